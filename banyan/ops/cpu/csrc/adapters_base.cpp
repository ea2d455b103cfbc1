#define ADAPTERS_TABLE adapters_base
#include "adapters.inl"
