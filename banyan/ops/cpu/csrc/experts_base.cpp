#define EXPERTS_TABLE experts_base
#include "experts.inl"
