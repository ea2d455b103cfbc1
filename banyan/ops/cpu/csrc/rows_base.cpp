#define ROWS_TABLE rows_base
#include "rows.inl"
