#define EXPERTS_TABLE experts_avx512
#include "experts.inl"
