#define STATE_TABLE state_base
#include "state.inl"
