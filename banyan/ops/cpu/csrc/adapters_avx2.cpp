#define ADAPTERS_TABLE adapters_avx2
#include "adapters.inl"
