// One SIMD group a query: outputs [queries, segments, WIDTH] and lse [queries, segments] become one of each.
const int query = GROUP_X;
const int segments = sizes[0];

float most = LOWEST;
for (int s = LANE; s < segments; s += 32) {
  const float x = lse[size_t(query) * segments + s];
  most = x > most ? x : most;
}
most = SIMD_MAX(most);

float total = 0.0f;
for (int s = LANE; s < segments; s += 32) {
  const float x = lse[size_t(query) * segments + s];
  total += x > LOWEST ? EXP(x - most) : 0.0f;
}
total = SIMD_SUM(total);

for (int field = LANE; field < WIDTH; field += 32) {
  float sum = 0.0f;
  for (int s = 0; s < segments; ++s) {
    const size_t at = size_t(query) * segments + s;
    const float x = lse[at];
    if (x > LOWEST) sum += EXP(x - most) * float(outputs[at * WIDTH + field]);
  }
  joined[size_t(query) * WIDTH + field] = OUT(total > 0.0f ? sum / total : 0.0f);
}
if (LANE == 0) joined_lse[query] = total > 0.0f ? most + LOG(total) : MINUS_INFINITY;
