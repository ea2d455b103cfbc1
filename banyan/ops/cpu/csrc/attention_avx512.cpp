#define ATTENTION_TABLE attention_avx512
#include "attention.inl"
