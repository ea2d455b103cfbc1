#define STATE_TABLE state_avx512
#include "state.inl"
