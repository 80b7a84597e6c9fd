// A thread group: one block of one row's tokens, for QUERIES of the folded queries of one KV head (folded: query
// head after query head of the KV head, LENGTH tokens each). A SIMD group takes every SIMDS-th token; a lane holds
// KEY_FIELDS of the 32 x KEY_FIELDS fields of a key, VALUE_FIELDS of a value, of each stored row read once.
const int row = GROUP_Z;
const int kv_head = GROUP_Y / CHUNKS;
const int first = GROUP_Y % CHUNKS * QUERIES;
const int capacity = sizes[0], kv_heads = sizes[1], blocks = sizes[2], block_tokens = sizes[3], window = sizes[4];
SHARED(float, mosts, SIMDS * QUERIES);
SHARED(float, totals, SIMDS * QUERIES);
SHARED(float, sums, SIMDS * VALUE_FIELDS * 32);

const int end = spans[2 * row + 1];
int begin = end - LENGTH + 1 - window;
begin = begin > spans[2 * row] ? begin : spans[2 * row];
const int from = begin + GROUP_X * block_tokens;
const int to = from + block_tokens < end ? from + block_tokens : end;

float query[QUERIES * KEY_FIELDS];
float sum[QUERIES * VALUE_FIELDS];
float most[QUERIES];
float total[QUERIES];
UNROLL
for (int q = 0; q < QUERIES; ++q) {
  const int folded = first + q < FOLDED ? first + q : FOLDED - 1;  // those past the last are never written
  const size_t at = ((size_t(row) * kv_heads + kv_head) * FOLDED + folded) * (KEY_FIELDS * 32) + LANE * KEY_FIELDS;
  UNROLL
  for (int e = 0; e < KEY_FIELDS; ++e) query[q * KEY_FIELDS + e] = float(queries[at + e]) * SCALE;
  UNROLL
  for (int e = 0; e < VALUE_FIELDS; ++e) sum[q * VALUE_FIELDS + e] = 0.0f;
  most[q] = LOWEST;
  total[q] = 0.0f;
}

for (int token = from + SIMD; token < to; token += SIMDS) {
  const size_t stored = (size_t(row) * kv_heads + kv_head) * capacity + token;
  float key[KEY_FIELDS];
  float value[VALUE_FIELDS];
#if KEY_BITS
  LOAD_AFFINE(key, KEY_FIELDS, KEY_BITS, KEY_GROUP, keys, key_scales, key_biases, stored)
#else
  LOAD_DENSE(key, KEY_FIELDS, keys, stored)
#endif
#if VALUE_BITS
  LOAD_AFFINE(value, VALUE_FIELDS, VALUE_BITS, VALUE_GROUP, values, value_scales, value_biases, stored)
#else
  LOAD_DENSE(value, VALUE_FIELDS, values, stored)
#endif
  UNROLL
  for (int q = 0; q < QUERIES; ++q) {
    float score = 0.0f;
    UNROLL
    for (int e = 0; e < KEY_FIELDS; ++e) score += query[q * KEY_FIELDS + e] * key[e];
    score = SIMD_SUM(score);
    const int own_end = end - LENGTH + 1 + (first + q) % LENGTH;
    if (token < own_end && token >= own_end - window) {
      const float highest = score > most[q] ? score : most[q];
      const float shrink = EXP(most[q] - highest);
      const float weight = EXP(score - highest);
      most[q] = highest;
      total[q] = total[q] * shrink + weight;
      UNROLL
      for (int e = 0; e < VALUE_FIELDS; ++e) {
        sum[q * VALUE_FIELDS + e] = sum[q * VALUE_FIELDS + e] * shrink + weight * value[e];
      }
    }
  }
}

UNROLL
for (int q = 0; q < QUERIES; ++q) {
  if (LANE == 0) {
    mosts[SIMD * QUERIES + q] = most[q];
    totals[SIMD * QUERIES + q] = total[q];
  }
}
UNROLL
for (int q = 0; q < QUERIES; ++q) {
  BARRIER();  // the sums of the query before were read
  UNROLL
  for (int e = 0; e < VALUE_FIELDS; ++e) {
    sums[(SIMD * 32 + LANE) * VALUE_FIELDS + e] = sum[q * VALUE_FIELDS + e];
  }
  BARRIER();
  if (first + q < FOLDED) {
    float highest = LOWEST;
    for (int s = 0; s < SIMDS; ++s) {
      highest = mosts[s * QUERIES + q] > highest ? mosts[s * QUERIES + q] : highest;
    }
    float all = 0.0f;
    for (int s = 0; s < SIMDS; ++s) all += totals[s * QUERIES + q] * EXP(mosts[s * QUERIES + q] - highest);
    const size_t at = ((size_t(row) * kv_heads + kv_head) * FOLDED + first + q) * blocks + GROUP_X;
    for (int field = THREAD; field < VALUE_FIELDS * 32; field += SIMDS * 32) {
      float x = 0.0f;
      for (int s = 0; s < SIMDS; ++s) {
        x += sums[s * VALUE_FIELDS * 32 + field] * EXP(mosts[s * QUERIES + q] - highest);
      }
      outputs[at * (VALUE_FIELDS * 32) + field] = all > 0.0f ? x / all : 0.0f;
    }
    if (THREAD == 0) lse[at] = all > 0.0f ? highest + LOG(all) : MINUS_INFINITY;
  }
}
