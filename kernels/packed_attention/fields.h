// A lane's fields of one stored row, from a dense plane: to[e] is field LANE x fields + e.
#define LOAD_DENSE(to, fields, plane, stored) \
  UNROLL \
  for (int e = 0; e < fields; ++e) to[e] = float(plane[(stored) * (fields * 32) + LANE * fields + e]);

// The same from an affine plane: words of 32 bits with the first field lowest, groups along the head's fields.
// `fields` and the fields of a word are powers of two, so a lane has whole words, or a part of one; a group is
// never smaller than a lane's share.
#define LOAD_AFFINE(to, fields, bits, group, words, scales, biases, stored) \
  { \
    const int own = LANE * fields; \
    const size_t word = (stored) * (fields * bits) + own * bits / 32; \
    const int shift = own * bits % 32; \
    const size_t own_group = (stored) * (fields * 32 / group) + own / group; \
    const float step = float(scales[own_group]); \
    const float zero = float(biases[own_group]); \
    UNROLL \
    for (int e = 0; e < fields; ++e) { \
      const unsigned level = words[word + e * bits / 32] >> (shift + e * bits % 32) & ((1u << bits) - 1u); \
      to[e] = step * float(level) + zero; \
    } \
  }
