#define ATTENTION_TABLE attention_base
#include "attention.inl"
