#define ADAPTERS_TABLE adapters_avx512
#include "adapters.inl"
