#define ATTENTION_TABLE attention_avx2
#include "attention.inl"
