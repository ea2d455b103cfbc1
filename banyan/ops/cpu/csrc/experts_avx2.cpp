#define EXPERTS_TABLE experts_avx2
#include "experts.inl"
