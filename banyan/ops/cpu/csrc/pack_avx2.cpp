#define PACK_TABLE pack_avx2
#include "pack.inl"
