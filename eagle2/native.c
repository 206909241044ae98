/* Decoder layers of the Llama family, above all over the few rows of a decoding step, for x86 CPUs; see native.py.
 *
 * A pass over few rows waits for the weights, so each weight is read once, in the order in which it lies in memory, and
 * converted to float32 in registers; or it is bfloat16 and multiplied as such, where the model is that and the processor
 * can.  What lies between the products is small, but some dozens of calls per layer, each cold because the weights have
 * streamed through the caches: here it is one function, with one team of threads for all layers.
 *
 * No row's result depends on which rows ride along, nor on the number of threads: every sum runs over the same numbers in
 * the same order.  A product sums over its inputs from the first to the last; attention runs over the row's own path in
 * order of position, wherever its rows lie in the cache.
 */
#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

enum {
    LANES = 8,
    PANEL = 2 * LANES, /* outputs that are computed together; their weights lie input by input */
    DEPTH = 576,       /* inputs per visit of a panel, so that both its weights and a tile's inputs stay in the L1 cache */
    CHUNK = 96,        /* rows per reading of all weights */
    QUERIES = 36,      /* that share a reading of the keys */
    AHEAD = 16384,     /* bytes from the weight in use to the one that is fetched into the L2 cache; hardware stops at pages */
};

#define UNROLLED _Pragma("GCC unroll 12")

/* A panel's outputs for one row in registers, and TILE, the rows that share a converted weight: 12 sums, 2 weights and an
 * input fill AVX2's 16 registers. */
#ifdef __AVX512F__
typedef __m512 Vector;
enum { VECTORS = 1, TILE = 12 };
#define VECTOR(operation) _mm512_##operation
#define EACH_HEIGHT(of) of(1) of(2) of(3) of(4) of(5) of(6) of(7) of(8) of(9) of(10) of(11)
static inline Vector from_half(const uint16_t *x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x)); }
static inline Vector from_byte(const int8_t *x)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)));
}
#else
typedef __m256 Vector;
enum { VECTORS = 2, TILE = 6 };
#define VECTOR(operation) _mm256_##operation
#define EACH_HEIGHT(of) of(1) of(2) of(3) of(4) of(5)
static inline Vector from_half(const uint16_t *x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x)); }
static inline Vector from_byte(const int8_t *x)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x)));
}
#endif

/* Weights [panels, inputs, PANEL] of a linear map, padded with zeros to whole panels; `bytes` for each of them: 4 is float32,
 * 2 float16, 1 a whole number, whose unit is the output's scale.  With `pairs` they lie as [panels, inputs / 2, PANEL, 2], two
 * bytes are bfloat16, and so are the map's inputs, whose number is even. */
typedef struct {
    int64_t outputs, inputs;
    const void *weights;
    const float *bias;   /* may be NULL */
    const float *scales; /* of each output, before the bias, padded like the weights; may be NULL */
    float scale;         /* of all; a power of two */
    int32_t bytes, pairs;
} Linear;

typedef struct {
    const float *attention_norm, *query_norm, *key_norm; /* each may be NULL */
    const float *mlp_norm;
    Linear qkv, out, gate_up, down;
} Layer;

/* Norms' weights hold a factor of the square root of their size; see `normalize`. */
typedef struct {
    int64_t layers, width, inner, heads, kv_heads, size;
    float eps;
    const Layer *layer;
    const float *final_norm; /* may be NULL */
} Blocks;

/* One pass.  The rows' own keys and values go to the slots total - rows .. total - 1.
 *
 * With `paired` the cache is bfloat16 and a head's slots lie as the weights of `pairs`, so that attention is made of the same
 * products: keys [slots / PANEL, size / 2, PANEL slots, 2], a panel's outputs being slots; values [slots / 2, size, 2]. */
typedef struct {
    int64_t rows, total, newest;
    const uint8_t *visible; /* [rows, newest]: which of the newest slots a row attends to; it attends to all before */
    const float *turns;     /* [rows, size / 2, 2]: cosine and sine */
    void *kv;               /* [layers, 2 * kv_heads, slots, size]: keys, then values */
    int64_t layer_stride, head_stride, paired;
} Pass;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Thread `id` of `team` has the items from part(n, id) up to part(n, id + 1). */
static inline int64_t part(int64_t n, int64_t id, int64_t team) { return n * id / team; }

/* ---- products -------------------------------------------------------------------------------------------------- */

/* Add to sums [rows, PANEL] what `depth` inputs contribute; `rows` and `bytes` are constants where this is called. */
__attribute__((always_inline)) static inline void tile(
    const int rows, const int bytes, const void *weights, const float *x, int64_t stride, int64_t depth, float *sums)
{
    enum { WIDTH = PANEL / VECTORS };
    Vector s[TILE][VECTORS]; /* where a compiler leaves the loops over these rolled, they stay in memory */
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++)
            s[r][v] = VECTOR(loadu_ps)(sums + r * PANEL + v * WIDTH);
    for (int64_t k = 0; k < depth; k++) {
        Vector w[VECTORS];
        const char *at = (const char *)weights + k * PANEL * bytes;
        _mm_prefetch(at + AHEAD, _MM_HINT_T1);
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            const void *part = at + v * WIDTH * bytes;
            w[v] = bytes == 1 ? from_byte(part) : bytes == 2 ? from_half(part) : VECTOR(loadu_ps)(part);
        }
        UNROLLED for (int r = 0; r < rows; r++) {
            const Vector input = VECTOR(set1_ps)(x[r * stride + k]);
            UNROLLED for (int v = 0; v < VECTORS; v++)
                s[r][v] = VECTOR(fmadd_ps)(input, w[v], s[r][v]);
        }
    }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++)
            VECTOR(storeu_ps)(sums + r * PANEL + v * WIDTH, s[r][v]);
}

#define HEIGHT(rows) case rows: KERNEL(rows, BYTES, weights, x, stride, depth, sums); return;
#define TILES(name)                                                                                                    \
    static void name(int64_t rows, const void *weights, const void *x, int64_t stride, int64_t depth, float *sums)    \
    {                                                                                                                  \
        switch (rows) { EACH_HEIGHT(HEIGHT) }                                                                          \
        KERNEL(TILE, BYTES, weights, x, stride, depth, sums);                                                          \
    }
#define KERNEL tile
#define BYTES 1
TILES(byte_tile)
#undef BYTES
#define BYTES 2
TILES(half_tile)
#undef BYTES
#define BYTES 4
TILES(full_tile)

#ifdef __AVX512BF16__
/* As `tile`: bfloat16's products, two for each sum at once, are added in float32.  It holds whole numbers of a byte. */
__attribute__((always_inline)) static inline void pair_tile_of(
    const int rows, const int bytes, const void *weights, const uint16_t *x, int64_t stride, int64_t depth, float *sums)
{
    __m512 s[TILE];
    UNROLLED for (int r = 0; r < rows; r++)
        s[r] = _mm512_loadu_ps(sums + r * PANEL);
    for (int64_t k = 0; k < depth; k += 2) {
        const char *at = (const char *)weights + k * PANEL * bytes;
        _mm_prefetch(at + AHEAD, _MM_HINT_T1);
        const __m512bh w =
            bytes == 1 ? _mm512_cvtne2ps_pbh(from_byte((const int8_t *)at + PANEL), from_byte((const int8_t *)at))
                       : (__m512bh)_mm512_loadu_si512(at);
        UNROLLED for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, x + r * stride + k, sizeof(pair));
            s[r] = _mm512_dpbf16_ps(s[r], w, (__m512bh)_mm512_set1_epi32(pair));
        }
    }
    UNROLLED for (int r = 0; r < rows; r++)
        _mm512_storeu_ps(sums + r * PANEL, s[r]);
}

#undef KERNEL
#define KERNEL pair_tile_of
#undef BYTES
#define BYTES 1
TILES(byte_pair_tile)
#undef BYTES
#define BYTES 2
TILES(pair_tile)

int32_t eagle2_pairs(void) { return 1; }

/* To bfloat16; y may be x. */
static void shorten(const float *x, int64_t count, uint16_t *y)
{
    for (int64_t i = 0; i < count; i += LANES) {
        const __m128bh rounded = _mm256_cvtneps_pbh(_mm256_loadu_ps(x + i));
        memcpy(y + i, &rounded, sizeof(rounded));
    }
}
#else
int32_t eagle2_pairs(void) { return 0; }
#define byte_pair_tile byte_tile /* never called */
#define pair_tile half_tile
static void shorten(const float *x, int64_t count, uint16_t *y) {}
#endif

static inline int64_t bytes_of_input(const Linear *map) { return map->pairs ? sizeof(uint16_t) : sizeof(float); }

/* Put `count` numbers, a multiple of LANES, at `index` of what the map takes as its inputs. */
static inline void feed(const Linear *map, const float *x, int64_t count, void *inputs, int64_t index)
{
    if (map->pairs)
        shorten(x, count, (uint16_t *)inputs + index);
    else if (x != (float *)inputs + index)
        memcpy((float *)inputs + index, x, count * sizeof(float));
}

typedef void Tile(int64_t rows, const void *weights, const void *x, int64_t stride, int64_t depth, float *sums);

static inline Tile *tile_of(const Linear *map)
{
    if (map->pairs)
        return map->bytes == 1 ? byte_pair_tile : pair_tile;
    return map->bytes == 1 ? byte_tile : map->bytes == 2 ? half_tile : full_tile;
}

/* One panel's outputs for x [rows, inputs], into sums [rows, PANEL]. */
static void panel(const Linear *map, int64_t index, const void *x, int64_t rows, float *sums)
{
    const int64_t inputs = map->inputs, bytes = PANEL * map->bytes;
    Tile *const multiply = tile_of(map);
    const char *weights = (const char *)map->weights + index * inputs * bytes;
    const int64_t tiles = (rows + TILE - 1) / TILE;
    memset(sums, 0, rows * PANEL * sizeof(float));
    for (int64_t k = 0; k < inputs; k += DEPTH)
        for (int64_t t = 0; t < tiles; t++) { /* of about the same height: seven rows take less as 3 + 4 than as 6 + 1 */
            const int64_t first = part(rows, t, tiles), height = part(rows, t + 1, tiles) - first;
            multiply(
                height, weights + k * bytes, (const char *)x + (first * inputs + k) * bytes_of_input(map), inputs,
                least(DEPTH, inputs - k), sums + first * PANEL);
        }
    const int64_t output = index * PANEL, count = least(PANEL, map->outputs - output);
    if (map->scale != 1)
        for (int64_t i = 0; i < rows * PANEL; i++)
            sums[i] *= map->scale;
    if (map->scales)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < PANEL; i++)
                sums[r * PANEL + i] *= map->scales[output + i];
    if (map->bias)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < count; i++)
                sums[r * PANEL + i] += map->bias[output + i];
}

static inline int64_t panels(const Linear *map) { return (map->outputs + PANEL - 1) / PANEL; }

/* y [rows, outputs] from x [rows, inputs], or added to y: the share of one thread.  `sums` holds CHUNK * PANEL floats. */
static void product(
    const Linear *map, const void *x, int64_t rows, float *y, int add, float *sums, int64_t id, int64_t team)
{
    const int64_t outputs = map->outputs, end = part(panels(map), id + 1, team);
    for (int64_t first = 0; first < rows; first += CHUNK) {
        const int64_t chunk = least(CHUNK, rows - first);
        for (int64_t p = part(panels(map), id, team); p < end; p++) {
            const int64_t count = least(PANEL, outputs - p * PANEL);
            panel(map, p, (const char *)x + first * map->inputs * bytes_of_input(map), chunk, sums);
            for (int64_t r = 0; r < chunk; r++) {
                float *to = y + (first + r) * outputs + p * PANEL;
                for (int64_t i = 0; i < count; i++)
                    to[i] = sums[r * PANEL + i] + (add ? to[i] : 0);
            }
        }
    }
}

void eagle2_linear(const Linear *map, const void *x, int64_t rows, float *y, int32_t threads)
{
#pragma omp parallel num_threads(threads)
    {
        float sums[CHUNK * PANEL];
        product(map, x, rows, y, 0, sums, omp_get_thread_num(), omp_get_num_threads());
    }
}

/* ---- what lies between them ------------------------------------------------------------------------------------ */

/* Of the lanes, always in this order. */
static inline float total_of(__m256 x)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* e^x to about two units in the last place (Cephes' polynomial); below -87.3 about 1e-38; NaN stays NaN by the order in which
 * bounds are taken.  `op` names an instruction for these lanes, whole(x) rounds, power(y, n) is y * 2^n. */
#define EXPONENTIAL(name, Lanes, op, whole, power)                                                                     \
    static inline Lanes name(Lanes x)                                                                                  \
    {                                                                                                                  \
        x = op(min_ps)(op(set1_ps)(88.3f), op(max_ps)(op(set1_ps)(-87.3f), x));                                        \
        const Lanes n = whole(op(mul_ps)(x, op(set1_ps)(1.44269504f)));                                                \
        x = op(fnmadd_ps)(n, op(set1_ps)(0.693359375f), x);                                                            \
        x = op(fnmadd_ps)(n, op(set1_ps)(-2.12194440e-4f), x);                                                         \
        Lanes y = op(set1_ps)(1.9875691500e-4f);                                                                       \
        y = op(fmadd_ps)(y, x, op(set1_ps)(1.3981999507e-3f));                                                         \
        y = op(fmadd_ps)(y, x, op(set1_ps)(8.3334519073e-3f));                                                         \
        y = op(fmadd_ps)(y, x, op(set1_ps)(4.1665795894e-2f));                                                         \
        y = op(fmadd_ps)(y, x, op(set1_ps)(1.6666665459e-1f));                                                         \
        y = op(fmadd_ps)(y, x, op(set1_ps)(5.0000001201e-1f));                                                         \
        y = op(fmadd_ps)(y, op(mul_ps)(x, x), op(add_ps)(x, op(set1_ps)(1)));                                          \
        return power(y, n);                                                                                            \
    }
#define EIGHT(operation) _mm256_##operation
#define EIGHT_WHOLE(x) _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
static inline __m256 times_power(__m256 y, __m256 n)
{
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(y, _mm256_castsi256_ps(power));
}
EXPONENTIAL(exponential, __m256, EIGHT, EIGHT_WHOLE, times_power)

/* RMS norm of `size` numbers, a multiple of LANES: x * weight / sqrt(sum of squares + size * eps). */
static void normalize(const float *x, const float *weight, int64_t size, float eps, float *y)
{
    __m256 squares = _mm256_setzero_ps();
    for (int64_t i = 0; i < size; i += LANES) {
        __m256 v = _mm256_loadu_ps(x + i);
        squares = _mm256_fmadd_ps(v, v, squares);
    }
    __m256 root = _mm256_sqrt_ps(_mm256_set1_ps(total_of(squares) + (float)size * eps));
    for (int64_t i = 0; i < size; i += LANES)
        _mm256_storeu_ps(
            y + i, _mm256_div_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(weight + i)), root));
}

/* One head of one row: norm (where the model has one), then rotation of adjacent pairs by turns [size / 2, 2]. */
static void turn(const float *x, const float *norm, const float *turns, int64_t size, float eps, float *y)
{
    if (norm) {
        normalize(x, norm, size, eps, y);
        x = y;
    }
    for (int64_t i = 0; i < size; i += 2) {
        const float a = x[i], b = x[i + 1], cosine = turns[i], sine = turns[i + 1];
        y[i] = a * cosine - b * sine;
        y[i + 1] = a * sine + b * cosine;
    }
}

/* Products of a query with LANES keys. */
static inline __m256 scores_of(const float *query, const float *const *keys, int64_t size)
{
    __m256 s[LANES];
    UNROLLED for (int j = 0; j < LANES; j++)
        s[j] = _mm256_setzero_ps();
    for (int64_t i = 0; i < size; i += LANES) {
        __m256 q = _mm256_loadu_ps(query + i);
        UNROLLED for (int j = 0; j < LANES; j++)
            s[j] = _mm256_fmadd_ps(q, _mm256_loadu_ps(keys[j] + i), s[j]);
    }
    __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(s[0], s[1]), _mm256_hadd_ps(s[2], s[3]));
    __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(s[4], s[5]), _mm256_hadd_ps(s[6], s[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

/* Add `count` weighted values to y, `vectors` of their LANES numbers from `at` on. */
__attribute__((always_inline)) static inline void mix(
    const int vectors, const float *weights, const float *const *values, int64_t at, int64_t count, float *y)
{
    __m256 s[8];
    UNROLLED for (int v = 0; v < vectors; v++)
        s[v] = _mm256_loadu_ps(y + at + v * LANES);
    for (int64_t t = 0; t < count; t++) {
        __m256 weight = _mm256_broadcast_ss(weights + t);
        UNROLLED for (int v = 0; v < vectors; v++)
            s[v] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(values[t] + at + v * LANES), s[v]);
    }
    UNROLLED for (int v = 0; v < vectors; v++)
        _mm256_storeu_ps(y + at + v * LANES, s[v]);
}

static void mix_all(const float *weights, const float *const *values, int64_t count, int64_t size, float *y)
{
    int64_t at = 0;
    for (; at + 8 * LANES <= size; at += 8 * LANES)
        mix(8, weights, values, at, count, y);
    for (; at < size; at += LANES)
        mix(1, weights, values, at, count, y);
}

/* Scores [padded] of one query become weights that are to be divided by what is returned. */
static float soften(float *scores, int64_t count, int64_t padded)
{
    for (int64_t t = count; t < padded; t++)
        scores[t] = -__builtin_inff(); /* will add 1e-38 to a sum that is at least 1 */
    __m256 most = _mm256_loadu_ps(scores);
    for (int64_t t = LANES; t < padded; t += LANES)
        most = _mm256_max_ps(most, _mm256_loadu_ps(scores + t));
    float lanes[LANES], highest = -__builtin_inff();
    _mm256_storeu_ps(lanes, most);
    for (int i = 0; i < LANES; i++)
        highest = lanes[i] > highest ? lanes[i] : highest;
    __m256 sum = _mm256_setzero_ps();
    for (int64_t t = 0; t < padded; t += LANES) {
        __m256 e = exponential(_mm256_sub_ps(_mm256_loadu_ps(scores + t), _mm256_set1_ps(highest)));
        sum = _mm256_add_ps(sum, e);
        _mm256_storeu_ps(scores + t, e);
    }
    return total_of(sum);
}

/* One query of a block: its scaled and rotated numbers, what it sees behind the slots that all see, where the result goes. */
typedef struct {
    const float *query;
    const int32_t *path;
    int64_t extra;
    int64_t straight; /* of the path's slots, so many that lie right behind those that all see, in order */
    float *y;
} Query;

/* Softmax attention of `n` queries of one key head.  All see the first `common` slots, which are read once for all of them;
 * each goes on along its own path.  `scores` has `room` for each query, `rows` for what one sees behind `common`, and LANES. */
static void attend(
    const Query *queries, int64_t n, const float *keys, const float *values, int64_t common, int64_t size,
    int64_t room, float *scores, const float **rows)
{
    const int64_t whole = common / LANES * LANES; /* a block that holds the end of what is common is each query's own */
    for (int64_t t = 0; t < whole; t += LANES) {
        const float *block[LANES];
        for (int j = 0; j < LANES; j++)
            block[j] = keys + (t + j) * size;
        for (int64_t q = 0; q < n; q++)
            _mm256_storeu_ps(scores + q * room + t, scores_of(queries[q].query, block, size));
    }
    for (int64_t q = 0; q < n; q++) {
        const int64_t count = common + queries[q].extra, padded = (count + LANES - 1) / LANES * LANES;
        for (int64_t t = whole; t < padded; t += LANES) {
            const float *block[LANES];
            for (int j = 0; j < LANES; j++) {
                const int64_t at = least(t + j, count - 1); /* padding takes the last key once more */
                block[j] = keys + (at < common ? at : queries[q].path[at - common]) * size;
            }
            _mm256_storeu_ps(scores + q * room + t, scores_of(queries[q].query, block, size));
        }
        const float sum = soften(scores + q * room, count, padded);
        for (int64_t t = 0; t < count; t++)
            scores[q * room + t] /= sum;
        memset(queries[q].y, 0, size * sizeof(float));
    }
    for (int64_t t = 0; t < whole; t += LANES) {
        const float *block[LANES];
        for (int j = 0; j < LANES; j++)
            block[j] = values + (t + j) * size;
        for (int64_t q = 0; q < n; q++)
            mix_all(scores + q * room + t, block, LANES, size, queries[q].y);
    }
    for (int64_t q = 0; q < n; q++) {
        const int64_t count = common + queries[q].extra;
        for (int64_t t = whole; t < count; t++)
            rows[t - whole] = values + (t < common ? t : queries[q].path[t - common]) * size;
        mix_all(scores + q * room + whole, rows, count - whole, size, queries[q].y);
    }
}

/* ---- the same in bfloat16 -------------------------------------------------------------------------------------- */

/* Where element i of a slot's key and value lies within its head's keys and values. */
static inline int64_t key_at(int64_t slot, int64_t i, int64_t size)
{
    return slot / PANEL * PANEL * size + i / 2 * 2 * PANEL + slot % PANEL * 2 + i % 2;
}
static inline int64_t value_at(int64_t slot, int64_t i, int64_t size) { return (slot / 2 * size + i) * 2 + slot % 2; }

static inline void copy_key(const uint16_t *from, int64_t slot, uint16_t *to, int64_t at, int64_t size)
{
    for (int64_t i = 0; i < size; i += 2) /* two lie together */
        memcpy(to + key_at(at, i, size), from + key_at(slot, i, size), 2 * sizeof(*to));
}

static inline void copy_value(const uint16_t *from, int64_t slot, uint16_t *to, int64_t at, int64_t size)
{
    for (int64_t i = 0; i < size; i++)
        to[value_at(at, i, size)] = from[value_at(slot, i, size)];
}

/* Move `count` slots behind the first `length`, slots[j] + length to j + length; slots[j] >= j, ascending. */
void eagle2_keep(
    uint16_t *kv, int64_t layers, int64_t kv_heads, int64_t layer_stride, int64_t head_stride, int64_t size,
    int64_t length, const int64_t *slots, int64_t count)
{
    for (int64_t l = 0; l < layers; l++)
        for (int64_t head = 0; head < kv_heads; head++) {
            uint16_t *keys = kv + l * layer_stride + head * head_stride, *values = keys + kv_heads * head_stride;
            for (int64_t j = 0; j < count; j++)
                if (slots[j] != j) {
                    copy_key(keys, length + slots[j], keys, length + j, size);
                    copy_value(values, length + slots[j], values, length + j, size);
                }
        }
}

#ifdef __AVX512BF16__
#define SIXTEEN(operation) _mm512_##operation
#define SIXTEEN_WHOLE(x) _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT)
EXPONENTIAL(exponential_of_16, __m512, SIXTEEN, SIXTEEN_WHOLE, _mm512_scalef_ps)

/* Scores [padded] of one query become weights in bfloat16, at the place of the scores; they are to be divided by what is
 * returned.  Those behind `count` become 0. */
static float soften_to_pairs(float *scores, int64_t count, int64_t padded)
{
    const __m512 none = _mm512_set1_ps(-__builtin_inff());
    for (int64_t t = count; t < padded; t++)
        scores[t] = -__builtin_inff();
    __m512 most = none;
    for (int64_t t = 0; t < padded; t += PANEL)
        most = _mm512_max_ps(most, _mm512_loadu_ps(scores + t));
    const __m512 highest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    __m512 sum = _mm512_setzero_ps();
    for (int64_t t = 0; t < padded; t += PANEL) {
        const __m512 x = _mm512_loadu_ps(scores + t);
        const __m512 e = _mm512_maskz_mov_ps(
            _mm512_cmp_ps_mask(x, none, _CMP_NEQ_UQ), exponential_of_16(_mm512_sub_ps(x, highest)));
        sum = _mm512_add_ps(sum, e);
        const __m256bh rounded = _mm512_cvtneps_pbh(e);
        memcpy((uint16_t *)scores + t, &rounded, sizeof(rounded));
    }
    return _mm512_reduce_add_ps(sum);
}

/* Add to y [rows, size] the `count` values [count / 2, size, 2] times the rows' weights: `vectors` * PANEL elements from `at`. */
__attribute__((always_inline)) static inline void mix_pairs_of(
    const int rows, const int vectors, const uint16_t *weights, int64_t room, const uint16_t *values, int64_t at,
    int64_t count, int64_t size, float *y)
{
    __m512 s[6][4];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < vectors; v++)
            s[r][v] = _mm512_loadu_ps(y + r * size + at + v * PANEL);
    for (int64_t t = 0; t < count; t += 2) {
        __m512bh each[4];
        UNROLLED for (int v = 0; v < vectors; v++)
            each[v] = (__m512bh)_mm512_loadu_si512(values + t * size + 2 * (at + v * PANEL));
        UNROLLED for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, weights + r * room + t, sizeof(pair));
            const __m512bh weight = (__m512bh)_mm512_set1_epi32(pair);
            UNROLLED for (int v = 0; v < vectors; v++)
                s[r][v] = _mm512_dpbf16_ps(s[r][v], weight, each[v]);
        }
    }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < vectors; v++)
            _mm512_storeu_ps(y + r * size + at + v * PANEL, s[r][v]);
}

/* The same for all elements. */
__attribute__((always_inline)) static inline void mix_rows(
    const int rows, const uint16_t *weights, int64_t room, const uint16_t *values, int64_t count, int64_t size, float *y)
{
    int64_t at = 0;
    for (; at + 4 * PANEL <= size; at += 4 * PANEL)
        mix_pairs_of(rows, 4, weights, room, values, at, count, size, y);
    for (; at < size; at += PANEL)
        mix_pairs_of(rows, 1, weights, room, values, at, count, size, y);
}

/* And for any number of rows. */
static void mix_pairs(
    int64_t rows, const uint16_t *weights, int64_t room, const uint16_t *values, int64_t count, int64_t size, float *y)
{
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6)
        mix_rows(6, weights + r * room, room, values, count, size, y + r * size);
    for (; r + 3 <= rows; r += 3)
        mix_rows(3, weights + r * room, room, values, count, size, y + r * size);
    for (; r < rows; r++)
        mix_rows(1, weights + r * room, room, values, count, size, y + r * size);
}

/* Scores of `n` queries [n, size], at most TILE, with the PANEL keys at `keys`; rows of scores are `room` apart. */
static inline void score(const uint16_t *query, int64_t n, const uint16_t *keys, int64_t size, float *scores, int64_t room)
{
    float sums[TILE * PANEL];
    memset(sums, 0, n * PANEL * sizeof(float));
    pair_tile(n, keys, query, size, size, sums);
    for (int64_t i = 0; i < n; i++)
        memcpy(scores + i * room, sums + i * PANEL, PANEL * sizeof(float));
}

/* PANEL slots of a path, from its slot `first` on, brought together; queries of one row share them. */
typedef struct {
    uint16_t *slots;
    const int32_t *path;
    int64_t first;
} Gathered;

/* The PANEL keys or values that a query sees from its slot t on: where they are, or gathered, with zeros behind the last. */
static inline const uint16_t *block_of(
    const Query *q, int64_t t, int64_t common, const uint16_t *all, int64_t size,
    void copy(const uint16_t *, int64_t, uint16_t *, int64_t, int64_t), Gathered *held)
{
    if (t + PANEL <= common + q->straight)
        return all + t * size;
    if (held->path != q->path || held->first != t) {
        held->path = q->path;
        held->first = t;
        memset(held->slots, 0, PANEL * size * sizeof(*held->slots));
        for (int64_t j = 0; j < least(PANEL, common + q->extra - t); j++)
            copy(all, t + j < common ? t + j : q->path[t + j - common], held->slots, j, size);
    }
    return held->slots;
}

/* As `attend`, from queries [n, size] in bfloat16, whose own `query` is not read; y are rows of one matrix [n, size].
 * `panels` holds keys or values of PANEL slots. */
static void attend_in_pairs(
    const Query *queries, const uint16_t *query, int64_t n, const uint16_t *keys, const uint16_t *values, int64_t common,
    int64_t size, int64_t room, float *scores, uint16_t *panels)
{
    const uint16_t *weights = (const uint16_t *)scores;
    float totals[QUERIES], *y = queries[0].y;
    int64_t whole = INT64_MAX; /* slots that all see in place, in whole blocks */
    for (int64_t q = 0; q < n; q++)
        whole = least(whole, (common + queries[q].straight) / PANEL * PANEL);
    for (int64_t t = 0; t < whole; t += PANEL)
        for (int64_t q = 0; q < n; q += TILE)
            score(query + q * size, least(TILE, n - q), keys + t * size, size, scores + q * room + t, room);
    Gathered held = {panels, NULL, 0};
    for (int64_t q = 0; q < n; q++) {
        const int64_t count = common + queries[q].extra, padded = (count + PANEL - 1) / PANEL * PANEL;
        for (int64_t t = whole; t < padded; t += PANEL)
            score(query + q * size, 1, block_of(queries + q, t, common, keys, size, copy_key, &held), size,
                  scores + q * room + t, room);
        totals[q] = soften_to_pairs(scores + q * room, count, padded);
    }
    memset(y, 0, n * size * sizeof(float));
    mix_pairs(n, weights, 2 * room, values, whole, size, y);
    held.path = NULL; /* these were keys */
    for (int64_t q = 0; q < n; q++) {
        for (int64_t t = whole; t < common + queries[q].extra; t += PANEL)
            mix_pairs(1, weights + q * 2 * room + t, 2 * room,
                      block_of(queries + q, t, common, values, size, copy_value, &held), PANEL, size, y + q * size);
        for (int64_t i = 0; i < size; i++)
            y[q * size + i] /= totals[q];
    }
}
#else
static void attend_in_pairs(
    const Query *queries, const uint16_t *query, int64_t n, const uint16_t *keys, const uint16_t *values, int64_t common,
    int64_t size, int64_t room, float *scores, uint16_t *panels) {}
#endif

/* ---- a pass ---------------------------------------------------------------------------------------------------- */

/* Floats of scratch that a pass takes: shared by all threads, and for each of them. */
static int64_t shared_floats(const Blocks *b, int64_t rows)
{
    return rows * ((b->heads + 2 * b->kv_heads) * b->size + b->heads * b->size + b->inner);
}

static inline int64_t room_of(int64_t total) { return (total + PANEL - 1) / PANEL * PANEL; }

static int64_t own_floats(const Blocks *b, int64_t rows, int64_t total, int64_t newest)
{
    /* Rows after a norm; sums of two panels; queries, their results and scores; a panel of keys or values; pointers, two
     * floats long; paths. */
    return rows * b->width + 2 * CHUNK * PANEL + QUERIES * (2 * b->size + room_of(total)) + PANEL * b->size +
           2 * (newest + LANES) + rows * (newest + 2) + 2;
}

int64_t eagle2_scratch(const Blocks *b, const Pass *pass, int32_t threads)
{
    return shared_floats(b, pass->rows) + threads * own_floats(b, pass->rows, pass->total, pass->newest);
}

/* All layers over x [rows, width], and the norm behind them, in place. */
void eagle2_layers(const Blocks *b, const Pass *pass, float *x, float *scratch, int32_t threads)
{
    const int64_t n = pass->rows, size = b->size, heads = b->heads, kv_heads = b->kv_heads, groups = heads / kv_heads;
    const int64_t fused = (heads + 2 * kv_heads) * size, first = pass->total - n, common = pass->total - pass->newest;
    const float scale = 1 / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss((float)size)));
    float *qkv = scratch;
    void *seen = qkv + n * fused, *inner = (float *)seen + n * heads * size; /* as the maps take them */
#pragma omp parallel num_threads(threads)
    {
        const int64_t id = omp_get_thread_num(), team = omp_get_num_threads();
        const int64_t room = room_of(pass->total), newest = pass->newest;
        char *own = (char *)(scratch + shared_floats(b, n) + id * own_floats(b, n, pass->total, newest));
        own += -(uintptr_t)own % sizeof(float *);
        const float **pointers = (const float **)own;
        int32_t *paths = (int32_t *)(pointers + newest + LANES), *extra = paths + n * newest, *straight = extra + n;
        float *scores = (float *)(straight + n), *turned = scores + QUERIES * room;
        float *found = turned + QUERIES * size, *sums = found + QUERIES * size, *normed = sums + 2 * CHUNK * PANEL;
        uint16_t *panels = (uint16_t *)(normed + n * b->width);
        /* The slots of each row's path behind those that all see. */
        for (int64_t r = 0; r < n; r++) {
            straight[r] = 0;
            for (int64_t t = extra[r] = 0; t < newest; t++)
                if (pass->visible[r * newest + t]) {
                    straight[r] += extra[r] == t;
                    paths[r * newest + extra[r]++] = (int32_t)(common + t);
                }
        }

        for (int64_t l = 0; l < b->layers; l++) {
            const Layer *layer = b->layer + l;
            const int64_t before = l * pass->layer_stride, between = kv_heads * pass->head_stride;
            float *keys = (float *)pass->kv + before, *values = keys + between;
            uint16_t *short_keys = (uint16_t *)pass->kv + before, *short_values = short_keys + between;
            /* Each thread norms all rows for itself: that costs less than to wait for the others. */
            if (layer->attention_norm) {
                for (int64_t r = 0; r < n; r++)
                    normalize(x + r * b->width, layer->attention_norm, b->width, b->eps, normed + r * b->width);
                feed(&layer->qkv, normed, n * b->width, normed, 0);
            } else
                feed(&layer->qkv, x, n * b->width, normed, 0);
            product(&layer->qkv, normed, n, qkv, 0, sums, id, team);
#pragma omp barrier
            for (int64_t i = part(n * kv_heads, id, team); i < part(n * kv_heads, id + 1, team); i++) {
                const int64_t r = i / kv_heads, head = i % kv_heads;
                const float *key = qkv + r * fused + (heads + head) * size;
                const int64_t shift = head * pass->head_stride, slot = first + r;
                if (pass->paired) {
                    uint16_t *one = (uint16_t *)(found + size);
                    turn(key, layer->key_norm, pass->turns + r * size, size, b->eps, found);
                    shorten(found, size, one);
                    for (int64_t j = 0; j < size; j++)
                        short_keys[shift + key_at(slot, j, size)] = one[j];
                    shorten(key + kv_heads * size, size, one);
                    for (int64_t j = 0; j < size; j++)
                        short_values[shift + value_at(slot, j, size)] = one[j];
                } else {
                    turn(key, layer->key_norm, pass->turns + r * size, size, b->eps, keys + shift + slot * size);
                    memcpy(values + shift + slot * size, key + kv_heads * size, size * sizeof(float));
                }
            }
#pragma omp barrier
            /* Queries in the order of their key heads, so that a thread's share reads few keys. */
            const int64_t each = n * groups, end = part(kv_heads * each, id + 1, team);
            for (int64_t i = part(kv_heads * each, id, team), next; i < end; i = next) {
                const int64_t head = i / each, shift = head * pass->head_stride;
                Query queries[QUERIES];
                next = least(least(end, (head + 1) * each), i + QUERIES);
                for (int64_t q = i; q < next; q++) {
                    const int64_t r = q % each / groups, of = head * groups + q % groups;
                    float *query = turned + (q - i) * size;
                    turn(qkv + r * fused + of * size, layer->query_norm, pass->turns + r * size, size, b->eps, query);
                    for (int64_t j = 0; j < size; j++)
                        query[j] *= scale;
                    queries[q - i] = (Query){query, paths + r * newest, extra[r], straight[r], found + (q - i) * size};
                }
                if (pass->paired) {
                    shorten(turned, (next - i) * size, (uint16_t *)turned);
                    attend_in_pairs(
                        queries, (const uint16_t *)turned, next - i, short_keys + shift, short_values + shift, common,
                        size, room, scores, panels);
                } else
                    attend(queries, next - i, keys + shift, values + shift, common, size, room, scores, pointers);
                for (int64_t q = i; q < next; q++) {
                    const int64_t r = q % each / groups, of = head * groups + q % groups;
                    feed(&layer->out, found + (q - i) * size, size, seen, (r * heads + of) * size);
                }
            }
#pragma omp barrier
            product(&layer->out, seen, n, x, 1, sums, id, team);
#pragma omp barrier
            for (int64_t r = 0; r < n; r++)
                normalize(x + r * b->width, layer->mlp_norm, b->width, b->eps, normed + r * b->width);
            feed(&layer->gate_up, normed, n * b->width, normed, 0);
            const int64_t half = b->inner / PANEL; /* panels of the gate; those of the other factor follow */
            for (int64_t begin = 0; begin < n; begin += CHUNK) {
                const int64_t chunk = least(CHUNK, n - begin);
                for (int64_t p = part(half, id, team); p < part(half, id + 1, team); p++) {
                    float *gate = sums, *up = sums + CHUNK * PANEL;
                    const char *rows = (const char *)normed + begin * b->width * bytes_of_input(&layer->gate_up);
                    panel(&layer->gate_up, p, rows, chunk, gate);
                    panel(&layer->gate_up, p + half, rows, chunk, up);
                    for (int64_t r = 0; r < chunk; r++) {
                        float *to = gate + r * PANEL;
                        for (int64_t i = 0; i < PANEL; i += LANES) {
                            __m256 g = _mm256_loadu_ps(to + i), u = _mm256_loadu_ps(up + r * PANEL + i);
                            __m256 one = _mm256_set1_ps(1), minus = _mm256_sub_ps(_mm256_setzero_ps(), g);
                            __m256 silu = _mm256_div_ps(g, _mm256_add_ps(one, exponential(minus)));
                            _mm256_storeu_ps(to + i, _mm256_mul_ps(silu, u));
                        }
                        feed(&layer->down, to, PANEL, inner, (begin + r) * b->inner + p * PANEL);
                    }
                }
            }
#pragma omp barrier
            product(&layer->down, inner, n, x, 1, sums, id, team);
#pragma omp barrier
        }
        if (b->final_norm)
            for (int64_t r = part(n, id, team); r < part(n, id + 1, team); r++)
                normalize(x + r * b->width, b->final_norm, b->width, b->eps, x + r * b->width);
    }
}

/* ---- the highest of a row -------------------------------------------------------------------------------------- */

/* The `k` highest of x [n] in descending order, the first of equals first; NaN where x holds one. */
static void highest(const float *x, int64_t n, int64_t k, float *values, int64_t *ids)
{
    int64_t held = 0, i = 0;
    int missing = 0;
    while (i < n) {
        if (held == k && i + LANES <= n) { /* most have nothing to offer: pass over LANES of them at once */
            const __m256 v = _mm256_loadu_ps(x + i);
            missing |= _mm256_movemask_ps(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
            if (!_mm256_movemask_ps(_mm256_cmp_ps(v, _mm256_set1_ps(values[k - 1]), _CMP_GT_OQ))) {
                i += LANES;
                continue;
            }
        }
        const int64_t end = held == k ? least(i + LANES, n) : i + 1;
        for (; i < end; i++) {
            missing |= x[i] != x[i];
            if (held == k && !(x[i] > values[k - 1]))
                continue;
            int64_t at = held < k ? held++ : k - 1;
            for (; at && x[i] > values[at - 1]; at--) {
                values[at] = values[at - 1];
                ids[at] = ids[at - 1];
            }
            values[at] = x[i];
            ids[at] = i;
        }
    }
    if (missing)
        for (int64_t j = 0; j < k; j++)
            values[j] = __builtin_nanf("");
}

/* Logarithm of the sum of e^x, by its highest element. */
static float log_sum(const float *x, int64_t n, float most)
{
    __m256 sum = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        sum = _mm256_add_ps(sum, exponential(_mm256_sub_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(most))));
    float rest = total_of(sum);
    for (; i < n; i++)
        rest += __builtin_expf(x[i] - most);
    return most + __builtin_logf(rest);
}

/* above[i]: how many numbers of row rows[i] of x [.., n] are greater than its number at columns[i]. */
void eagle2_above(
    const float *x, int64_t n, const int64_t *rows, const int64_t *columns, int64_t count, int64_t *above, int32_t threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; i++) {
        const float *row = x + rows[i] * n, own = row[columns[i]];
        int64_t found = 0, at = 0;
        for (; at + LANES <= n; at += LANES)
            found += __builtin_popcount(
                _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(row + at), _mm256_set1_ps(own), _CMP_GT_OQ)));
        for (; at < n; at++)
            found += row[at] > own;
        above[i] = found;
    }
}

/* For each row of x [rows, n] its `k` highest, k <= n; `softmax`: of its log-softmax. */
void eagle2_top(
    const float *x, int64_t rows, int64_t n, int64_t k, int32_t softmax, float *values, int64_t *ids, int32_t threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        highest(x + r * n, n, k, values + r * k, ids + r * k);
        if (softmax) {
            const float sum = log_sum(x + r * n, n, values[r * k]);
            for (int64_t j = 0; j < k; j++)
                values[r * k + j] -= sum;
        }
    }
}
