// Rows to the ranks of their experts and back; part of shared.cpp.
//
// Every rank knows the place of each pair of a token and an expert, of all tokens: so it knows what
// each of them posts, and where in its slot a row lies, and nothing is said beside the rows. A rank
// posts a row once, and who needs it reads it there.

// `places`: [size, per_token], numbered through all ranks, `of_rank` of them on each.
struct ExpertRowsArgs : Args {
  const uint8_t* x;
  uint8_t* out;
  const Joint* rows;  // null: all ranks have the same rows
  const int64_t* places;
  int64_t row_bytes, x_stride, of_rank;
  int32_t per_token;
  int32_t is_apart;  // each pair has a row of its own

  int32_t rank_of(int64_t token, int32_t k) const {
    return (int32_t)(places[token * per_token + k] / of_rank);
  }
  uint64_t ranks_of(int64_t token) const {  // a bit for each
    uint64_t found = 0;
    for (int32_t k = 0; k < per_token; k++) found |= 1ull << rank_of(token, k);
    return found;
  }
};
static_assert(MAX_RANKS <= 64, "a bit for each rank");

// Rows that fit into a slot; 0 and the reason when fewer than `least` do.
int64_t rows_of_slot(const ExpertRowsArgs& a, int64_t least, Worker& worker) {
  Shared& g = *a.group;
  int64_t count = g.slot / a.row_bytes;
  if (count >= least) return count;
  std::snprintf(g.failure, sizeof g.failure, "%lld rows of %lld bytes in a slot of %lld bytes",
                (long long)least, (long long)a.row_bytes, (long long)g.slot);
  worker.failure = g.failure;
  return 0;
}

// As gather_rows, but each rank reads the rows alone that have an expert there.
void dispatch_rows(const void* args, const Sizes& sizes, int64_t, int64_t, Worker& worker) {
  const ExpertRowsArgs& a = *(const ExpertRowsArgs*)args;
  Shared& g = *a.group;
  if (!g.begin(worker)) return;
  int64_t all = sizes.n[a.size], longest = 0, sum = 0, high = rows_of_slot(a, 1, worker);
  for (int32_t r = 0; r < g.ranks; r++) {
    if (a.rows->given(r) > longest) longest = a.rows->given(r);
    sum += a.rows->given(r);
  }
  if (!high) return;
  if (sum != all) {
    std::snprintf(g.failure, sizeof g.failure, "the ranks give %lld rows, not %lld",
                  (long long)sum, (long long)all);
    worker.failure = g.failure;
    return;
  }
  int64_t mine = a.rows->given(g.rank);
  for (int64_t at = 0; at < longest; at += high) {
    uint8_t* slot = g.open_turn();
    for (int64_t i = 0; i < high && at + i < mine; i++)
      std::memcpy(slot + i * a.row_bytes, a.x + (at + i) * a.x_stride, a.row_bytes);
    if (!g.meet(what_of(DISPATCH, all * a.row_bytes), worker)) return;
    int64_t first = at;
    for (int32_t r = 0; r < g.ranks; first += a.rows->given(r++))
      for (int64_t i = 0; i < high && at + i < a.rows->given(r); i++)
        if (a.ranks_of(first + i) >> g.rank & 1)
          std::memcpy(a.out + (first + i) * a.row_bytes, g.slot_of(r) + i * a.row_bytes,
                      a.row_bytes);
  }
}

// Rows that each rank posts for one token more.
void count_rows(const ExpertRowsArgs& a, int64_t token, int64_t* counts) {
  if (a.is_apart) {
    for (int32_t k = 0; k < a.per_token; k++) counts[a.rank_of(token, k)]++;
    return;
  }
  uint64_t ranks = a.ranks_of(token);
  for (int32_t r = 0; r < a.group->ranks; r++) counts[r] += ranks >> r & 1;
}

// The first token that a turn from `token` on has no room for.
int64_t end_of_turn(const ExpertRowsArgs& a, int64_t token, int64_t all, int64_t high) {
  int64_t counts[MAX_RANKS] = {};
  for (int64_t at = token; at < all; at++) {
    count_rows(a, at, counts);
    for (int32_t r = 0; r < a.group->ranks; r++)
      if (counts[r] > high) return at;
  }
  return all;
}

void post_rows(const ExpertRowsArgs& a, int64_t token, int64_t end) {
  Shared& g = *a.group;
  uint8_t* to = g.open_turn();
  auto post = [&](const uint8_t* row) {
    std::memcpy(to, row, a.row_bytes);
    to += a.row_bytes;
  };
  for (; token < end; token++) {
    if (a.is_apart) {
      for (int32_t k = 0; k < a.per_token; k++)
        if (a.rank_of(token, k) == g.rank) post(a.x + (token * a.per_token + k) * a.row_bytes);
    } else if (a.ranks_of(token) >> g.rank & 1) {
      post(a.x + token * a.row_bytes);
    }
  }
}

// Read one token of this rank's from where `next` says that each rank has posted it.
void read_rows(const ExpertRowsArgs& a, int64_t token, int64_t to, const int64_t* next) {
  Shared& g = *a.group;
  if (a.is_apart) {
    int64_t taken[MAX_RANKS] = {};
    for (int32_t k = 0; k < a.per_token; k++) {
      int32_t r = a.rank_of(token, k);
      std::memcpy(a.out + (to * a.per_token + k) * a.row_bytes,
                  g.slot_of(r) + (next[r] + taken[r]++) * a.row_bytes, a.row_bytes);
    }
    return;
  }
  float* __restrict out = (float*)(a.out + to * a.row_bytes);
  int64_t width = a.row_bytes / 4;
  std::memset(out, 0, a.row_bytes);
  uint64_t ranks = a.ranks_of(token);
  for (int32_t r = 0; r < g.ranks; r++) {
    if (!(ranks >> r & 1)) continue;
    const float* __restrict row = (const float*)(g.slot_of(r) + next[r] * a.row_bytes);
    for (int64_t i = 0; i < width; i++) out[i] += row[i];
  }
}

// The way back: what ranks have made of the rows that went to them. A token's are added in the order
// of the ranks, or lie beside one another where each pair has a row.
void combine_rows(const void* args, const Sizes& sizes, int64_t, int64_t, Worker& worker) {
  const ExpertRowsArgs& a = *(const ExpertRowsArgs*)args;
  Shared& g = *a.group;
  if (!g.begin(worker)) return;
  int64_t all = sizes.n[a.size], high = rows_of_slot(a, a.is_apart ? a.per_token : 1, worker);
  int64_t first = a.rows ? a.rows->first : 0, last = a.rows ? first + a.rows->mine : all;
  for (int64_t token = 0, end; high && token < all; token = end) {
    end = end_of_turn(a, token, all, high);
    post_rows(a, token, end);
    if (!g.meet(what_of(COMBINE, all * a.row_bytes), worker)) return;
    int64_t next[MAX_RANKS] = {};
    for (int64_t at = token; at < end && at < last; at++) {
      if (at >= first) read_rows(a, at, at - first, next);
      count_rows(a, at, next);
    }
  }
}

void cost_of_expert_rows(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const ExpertRowsArgs& a = *(const ExpertRowsArgs*)args;
  *bytes = (double)(sizes.n[a.size] * a.row_bytes) * (a.is_apart ? a.per_token : 1) * 2;
  *operations = 0;
}

const Kernel DISPATCH_KERNEL = {"dispatch_rows", if_any, always, dispatch_rows,
                                cost_of_expert_rows};
const Kernel COMBINE_KERNEL = {"combine_rows", if_any, always, combine_rows, cost_of_expert_rows};
