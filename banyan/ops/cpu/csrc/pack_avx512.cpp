#define PACK_TABLE pack_avx512
#include "pack.inl"
