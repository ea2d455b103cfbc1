#define STATE_TABLE state_avx2
#include "state.inl"
