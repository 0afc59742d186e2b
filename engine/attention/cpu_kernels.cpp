// The CPU's own kernels: paged attention, matrix products, RMSNorm, rotary embedding, activation.
//
// Compiled on demand by cpu_build.py with nothing but a C++ compiler, called from cpu_kernels.py
// with plain pointers. Numbers are stored as float or bfloat16 and always computed in float.
//
// Vectors are the compiler's own (GCC and Clang): eight floats lie in one AVX register, in half of
// an AVX-512 one, in two of NEON. No intrinsics, so the same text serves every processor.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <vector>

namespace {

constexpr int LANES = 8;
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(16)));
typedef float Quad __attribute__((vector_size(16)));

#if defined(__clang__) || __GNUC__ >= 12
#define PICK(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
typedef int32_t QuadInts __attribute__((vector_size(16)));
#define PICK(a, b, i, j, k, l) __builtin_shuffle(a, b, QuadInts{i, j, k, l})
#endif

// ------------------------------------------------------------------ storage: float and bfloat16

struct Brain {  // bfloat16: the upper half of a float
    uint16_t bits;
};

inline Floats load(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);  // any address; compiles to one instruction
    return x;
}

inline Floats load(const Brain* from) {
    Halves raw;
    std::memcpy(&raw, from, sizeof raw);
    Words wide = __builtin_convertvector(raw, Words) << 16;
    Floats x;
    std::memcpy(&x, &wide, sizeof x);
    return x;
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

inline void store(Brain* to, Floats x) {  // to the nearest, ties to even; NaN stays NaN
    Words wide;
    std::memcpy(&wide, &x, sizeof x);
    Words rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    Words quiet = (wide >> 16) | 0x40;
    Halves raw = __builtin_convertvector((wide & 0x7fffffff) > 0x7f800000 ? quiet : rounded,
                                         Halves);
    std::memcpy(to, &raw, sizeof raw);
}

// ------------------------------------------------------------------ arithmetic

inline Floats all(float x) { return Floats{} + x; }

inline Quad half(Floats x, int which) {
    Quad parts[2];
    std::memcpy(parts, &x, sizeof x);
    return parts[which];
}

// The sums of four vectors' lanes, side by side: cheaper together than one by one.
inline Quad sum4(Floats a, Floats b, Floats c, Floats d) {
    Quad w = half(a, 0) + half(a, 1), x = half(b, 0) + half(b, 1);
    Quad y = half(c, 0) + half(c, 1), z = half(d, 0) + half(d, 1);
    Quad wx = PICK(w, x, 0, 4, 1, 5) + PICK(w, x, 2, 6, 3, 7);
    Quad yz = PICK(y, z, 0, 4, 1, 5) + PICK(y, z, 2, 6, 3, 7);
    return PICK(wx, yz, 0, 1, 4, 5) + PICK(wx, yz, 2, 3, 6, 7);
}

inline float sum(Floats x) {
    Quad q = half(x, 0) + half(x, 1);
    return (q[0] + q[2]) + (q[1] + q[3]);
}

inline float largest(Floats x) {
    Quad a = half(x, 0), b = half(x, 1);
    Quad q = a > b ? a : b;
    return std::max(std::max(q[0], q[1]), std::max(q[2], q[3]));
}

// e^x for x <= 0, within 2 units in the last place: x = n ln 2 + r, then 2^n times the series of
// e^r. 2^n is made by writing n into a float's exponent. Below -87 the result is 0.
inline Floats exp_of_negative(Floats x) {
    const float low = -87.0f;
    Floats kept = x < low ? all(low) : x;
    Ints n = __builtin_convertvector(kept * 1.44269504f - 0.5f, Ints);  // cut off = rounded
    Floats whole = __builtin_convertvector(n, Floats);
    Floats r = (kept - whole * 0.693359375f) + whole * 2.12194440e-4f;  // ln 2 in two parts
    Floats y = all(1.0f / 720);
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    Ints bits = (n + 127) << 23;
    Floats power;
    std::memcpy(&power, &bits, sizeof power);
    return x < low ? all(0.0f) : y * power;
}

// ------------------------------------------------------------------ paged attention

// A step's attention. Rows of one K/V head's group share every key that is loaded.
struct Attention {
    const int32_t* items;    // [num_items, 5]: row, first and last query, first and last K/V head
    const int32_t* cu_seqlens;  // [rows + 1]
    const int32_t* lengths;  // [rows]: tokens of context
    const int32_t* tables;   // [rows, table_width]
    int64_t table_width, block_size, heads, kv_heads, dim;
    int64_t q_stride;        // from token to token; heads lie side by side
    float scale;
};

constexpr int TILE = 64;  // keys taken together: their scores stay in the cache

// What one thread works with. Allocated once a call, grown never.
struct Scratch {
    std::vector<float> q, acc, best, total, scores;
    int64_t at[TILE], next[TILE];  // where the tile's keys lie in the cache, in numbers

    void fit(int64_t heads, int64_t rows, int64_t dim) {
        q.resize(heads * rows * dim);
        acc.assign(heads * rows * dim, 0.0f);
        best.assign(heads * rows, -INFINITY);
        total.assign(heads * rows, 0.0f);
        scores.resize(rows * TILE);
    }
};

// scores[r][t] = q[r] . k[t] for R rows and four keys; each q and k is loaded once.
template <int R, typename T>
inline void dots(const float* q, const T* const* k, int64_t dim, float* scores) {
    Floats sums[R][4] = {};
    for (int64_t d = 0; d < dim; d += LANES) {
        Floats key[4];
        for (int t = 0; t < 4; t++) key[t] = load(k[t] + d);
        for (int r = 0; r < R; r++) {
            Floats x = load(q + r * dim + d);
            for (int t = 0; t < 4; t++) sums[r][t] += x * key[t];
        }
    }
    for (int r = 0; r < R; r++) {
        Quad out = sum4(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
        std::memcpy(scores + r * TILE, &out, sizeof out);
    }
}

// acc[r] += sum over t of p[r][t] v[t], for W vectors of channels at a time.
template <int R, int W, typename T>
inline void weigh(const float* p, const T* v, const int64_t* at, int keys, int64_t dim,
                  float* acc) {
    Floats sums[R][W];
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) sums[r][w] = load(acc + r * dim + w * LANES);
    for (int t = 0; t < keys; t++) {
        Floats value[W];
        for (int w = 0; w < W; w++) value[w] = load(v + at[t] + w * LANES);
        for (int r = 0; r < R; r++)
            for (int w = 0; w < W; w++) sums[r][w] += p[r * TILE + t] * value[w];
    }
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) store(acc + r * dim + w * LANES, sums[r][w]);
}

// One row's scores to weights, in place: exp(score - best so far). Online softmax: when a tile
// brings a better best, what was summed before shrinks by exp(old best - new best).
inline void soften(float* scores, int seen, float* best, float* total, float* acc, int64_t dim) {
    int end = (seen + LANES - 1) / LANES * LANES;
    std::fill(scores + seen, scores + TILE, -INFINITY);
    Floats top = load(scores);
    for (int t = LANES; t < end; t += LANES) {
        Floats x = load(scores + t);
        top = x > top ? x : top;
    }
    float now = largest(top);
    if (now > *best) {
        float shrink = std::exp(*best - now);
        for (int64_t d = 0; d < dim; d += LANES) store(acc + d, load(acc + d) * shrink);
        *total *= shrink;
        *best = now;
    }
    Floats added = {};
    for (int t = 0; t < TILE; t += LANES) {
        Floats weight = exp_of_negative(load(scores + t) - *best);
        store(scores + t, weight);
        added += weight;
    }
    *total += sum(added);
}

// R rows of one K/V head over one tile of keys. seen[r]: how many of them row r may look at.
template <int R, typename T>
void rows_over_tile(const float* q, const T* k, const T* v, const int64_t* at, const int* seen,
                    int64_t dim, float* scores, float* best, float* total, float* acc) {
    int keys = *std::max_element(seen, seen + R);
    for (int t = 0; t < keys; t += 4) {
        const T* four[4];  // past the end: the last key again, whose score is thrown away
        for (int i = 0; i < 4; i++) four[i] = k + at[std::min(t + i, keys - 1)];
        dots<R>(q, four, dim, scores + t);
    }
    for (int r = 0; r < R; r++)
        if (seen[r]) soften(scores + r * TILE, seen[r], best + r, total + r, acc + r * dim, dim);
        else std::fill(scores + r * TILE, scores + (r + 1) * TILE, 0.0f);
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) weigh<R, 4>(scores, v + d, at, keys, dim, acc + d);
    for (; d < dim; d += LANES) weigh<R, 1>(scores, v + d, at, keys, dim, acc + d);
}

// One item: some queries of one request, some K/V heads. Keys are taken in the order in which they
// lie in memory, all heads of a tile before the next tile.
template <typename T>
void attend_item(const Attention& a, const int32_t* item, const T* q, const T* k, const T* v,
                 T* out, Scratch& s) {
    const int64_t row = item[0], group = a.heads / a.kv_heads, dim = a.dim;
    const int64_t first_head = item[3], heads = item[4] - item[3];
    const int64_t queries = a.cu_seqlens[row + 1] - a.cu_seqlens[row];
    const int64_t first = a.cu_seqlens[row] + item[1], rows = (item[2] - item[1]) * group;
    const int32_t* table = a.tables + row * a.table_width;
    const int64_t line = a.kv_heads * dim;  // numbers a slot
    s.fit(heads, rows, dim);
    for (int64_t h = 0; h < heads; h++)
        for (int64_t r = 0; r < rows; r++) {  // row r of a head: query r / group, head r % group
            const T* from = q + (first + r / group) * a.q_stride
                            + ((first_head + h) * group + r % group) * dim;
            float* to = s.q.data() + (h * rows + r) * dim;
            for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(from + d) * a.scale);
        }
    // Query i of the request sees its first `before + i + 1` positions: bottom right.
    const int64_t before = a.lengths[row] - queries;
    const int64_t end = std::max<int64_t>(before + item[2], 0);
    auto locate = [&](int64_t start, int64_t* at) {
        int64_t block = start / a.block_size, offset = start % a.block_size;
        for (int64_t t = 0; t < std::min<int64_t>(TILE, end - start); t++) {
            at[t] = (table[block] * a.block_size + offset) * line + first_head * dim;
            if (++offset == a.block_size) { offset = 0; block++; }
        }
    };
    locate(0, s.at);
    for (int64_t start = 0; start < end; start += TILE) {
        if (start + TILE < end) {  // ask for the next tile's first lines while this one is used
            locate(start + TILE, s.next);
            int64_t keys = std::min<int64_t>(TILE, end - start - TILE);
            for (int64_t t = 0; t < keys; t++)
                for (int64_t d = 0; d < heads * dim; d += 64 / (int64_t)sizeof(T)) {
                    __builtin_prefetch(k + s.next[t] + d, 0, 2);
                    __builtin_prefetch(v + s.next[t] + d, 0, 2);
                }
        }
        for (int64_t h = 0; h < heads; h++)
            for (int64_t r = 0; r < rows;) {
                int many = (int)std::min<int64_t>(rows - r, 4), seen[4];
                for (int i = 0; i < many; i++) {
                    int64_t visible = before + item[1] + (r + i) / group + 1 - start;
                    seen[i] = (int)std::clamp<int64_t>(visible, 0, TILE);
                }
                const int64_t at = h * rows + r;
                auto run = [&](auto tile) {
                    tile(s.q.data() + at * dim, k + h * dim, v + h * dim, s.at, seen, dim,
                         s.scores.data() + r * TILE, s.best.data() + at, s.total.data() + at,
                         s.acc.data() + at * dim);
                };
                if (*std::max_element(seen, seen + many) > 0) {
                    if (many == 4) run(rows_over_tile<4, T>);
                    else if (many == 3) run(rows_over_tile<3, T>);
                    else if (many == 2) run(rows_over_tile<2, T>);
                    else run(rows_over_tile<1, T>);
                }
                r += many;
            }
        std::swap(s.at, s.next);
    }
    for (int64_t h = 0; h < heads; h++)
        for (int64_t r = 0; r < rows; r++) {
            T* to = out + ((first + r / group) * a.heads + (first_head + h) * group + r % group)
                          * dim;
            float total = s.total[h * rows + r];
            Floats share = all(total == 0.0f ? 0.0f : 1.0f / total);  // saw nothing: 0
            const float* from = s.acc.data() + (h * rows + r) * dim;
            for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(from + d) * share);
        }
}

// Write k and v of all tokens to their slots (a negative slot: nowhere), then attend. The loops
// end at a barrier, so every row finds what any row wrote.
template <typename T>
void attend(const Attention& a, int64_t num_items, const T* q, const T* k, const T* v,
            int64_t kv_stride, const int64_t* slots, int64_t tokens, T* k_cache, T* v_cache,
            T* out, int threads) {
    const int64_t line = a.kv_heads * a.dim;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t++) {
            if (slots[t] < 0) continue;
            std::memcpy(k_cache + slots[t] * line, k + t * kv_stride, line * sizeof(T));
            std::memcpy(v_cache + slots[t] * line, v + t * kv_stride, line * sizeof(T));
        }
        Scratch scratch;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_items; i++)
            attend_item(a, a.items + 5 * i, q, k_cache, v_cache, out, scratch);
    }
}

// ------------------------------------------------------------------ matrix products

constexpr int PANEL = 16;  // outputs whose weights lie side by side: [outputs / 16, inputs, 16]
constexpr int STRIP = 6;   // rows of x taken together: 6 x 16 sums fill the 16 AVX registers
constexpr int64_t STAY = 96;  // rows of x that are run against all panels before the next rows are

// R rows of x times one panel: every weight is loaded once for R rows, every x once for 16 outputs.
template <int R>
inline void strip(const float* x, int64_t depth, const float* panel, const float* bias, float* out,
                  int64_t width) {
    Floats sums[R][2];
    for (int r = 0; r < R; r++)
        for (int h = 0; h < 2; h++)
            sums[r][h] = bias == nullptr ? Floats{} : load(bias + h * LANES);
    for (int64_t k = 0; k < depth; k++) {
        Floats low = load(panel + k * PANEL), high = load(panel + k * PANEL + LANES);
        for (int r = 0; r < R; r++) {
            sums[r][0] += x[r * depth + k] * low;
            sums[r][1] += x[r * depth + k] * high;
        }
    }
    for (int r = 0; r < R; r++)
        for (int h = 0; h < 2; h++) store(out + r * width + h * LANES, sums[r][h]);
}

// out [rows, width] = x [rows, depth] times the panels' transpose, plus bias. Threads share the
// panels; each is read from memory once for up to STAY rows, which stay in the cache meanwhile.
void multiply(const float* x, int64_t rows, int64_t depth, const float* panels, int64_t width,
              const float* bias, float* out, int threads) {
#pragma omp parallel num_threads(threads)
    for (int64_t start = 0; start < rows; start += STAY) {
        const int64_t many = std::min(STAY, rows - start), strips = (many + STRIP - 1) / STRIP;
#pragma omp for schedule(static) nowait
        for (int64_t p = 0; p < width / PANEL; p++)
            for (int64_t s = 0; s < strips; s++) {  // strips of equal height, give or take one
                const int64_t first = start + many * s / strips;
                const int64_t height = start + many * (s + 1) / strips - first;
                auto run = [&](auto rows_at_once) {
                    rows_at_once(x + first * depth, depth, panels + p * depth * PANEL,
                                 bias == nullptr ? nullptr : bias + p * PANEL,
                                 out + first * width + p * PANEL, width);
                };
                if (height == 6) run(strip<6>);
                else if (height == 5) run(strip<5>);
                else if (height == 4) run(strip<4>);
                else if (height == 3) run(strip<3>);
                else if (height == 2) run(strip<2>);
                else run(strip<1>);
            }
    }
}

// ------------------------------------------------------------------ the small operations

constexpr int64_t SMALL = 32768;  // up to so many numbers one thread is done before others begin

// out = x / rms(x) * weight over rows of `dim`; with `add`, x + add takes x's place and is written
// to `sum`, which saves reading it again. Rows are [outer, inner, dim], `stride` apart.
template <typename T>
void rms_norm(const T* x, int64_t outer, int64_t inner, int64_t stride, int64_t dim, const T* add,
              T* sums, const T* weight, float eps, T* out, int threads) {
#pragma omp parallel for num_threads(threads) if (outer * inner * dim > SMALL)
    for (int64_t i = 0; i < outer * inner; i++) {
        const T* from = x + i / inner * stride + i % inner * dim;
        Floats squares = {};
        for (int64_t d = 0; d < dim; d += LANES) {
            Floats value = load(from + d);
            if (add != nullptr) {
                store(sums + i * dim + d, value + load(add + i * dim + d));
                value = load(sums + i * dim + d);  // as rounded
            }
            squares += value * value;
        }
        if (add != nullptr) from = sums + i * dim;
        float factor = 1.0f / std::sqrt(sum(squares) / dim + eps);
        for (int64_t d = 0; d < dim; d += LANES)
            store(out + i * dim + d, load(from + d) * factor * load(weight + d));
    }
}

// Turn the two halves of each head by its token's angle, in place: x cos + swapped x sin, where the
// first half of `sin` carries the minus sign.
template <typename T>
void rotate(T* x, int64_t tokens, int64_t heads, int64_t stride, int64_t dim, const T* cos,
            const T* sin, int threads) {
    const int64_t half = dim / 2;
#pragma omp parallel for num_threads(threads) if (tokens * heads * dim > SMALL)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t d = 0; d < half; d += LANES) {
                T* low = x + t * stride + h * dim + d;
                T* high = low + half;
                const T* c = cos + t * dim + d;
                const T* s = sin + t * dim + d;
                Floats a = load(low), b = load(high);
                store(low, a * load(c) + b * load(s));
                store(high, b * load(c + half) + a * load(s + half));
            }
}

// out = silu(gate) * up, where [rows, 2 width] holds gate and up side by side.
template <typename T>
void silu_mul(const T* gate_up, int64_t rows, int64_t width, T* out, int threads) {
#pragma omp parallel for num_threads(threads) if (4 * rows * width > SMALL)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < width; d += LANES) {
            Floats x = load(gate_up + 2 * r * width + d);
            Floats up = load(gate_up + (2 * r + 1) * width + d);
            Floats e = exp_of_negative(x > 0.0f ? -x : x);
            Floats sigmoid = (x > 0.0f ? all(1.0f) : e) / (e + 1.0f);
            store(out + r * width + d, x * sigmoid * up);
        }
}

}  // namespace

// ------------------------------------------------------------------ what Python calls

extern "C" int max_threads() { return omp_get_max_threads(); }

extern "C" void multiply_float32(const float* x, int64_t rows, int64_t depth, const float* panels,
                                 int64_t width, const float* bias, float* out, int threads) {
    multiply(x, rows, depth, panels, width, bias, out, threads);
}

#define EXPORT(T, suffix)                                                                         \
    extern "C" void attend_##suffix(                                                              \
        const int32_t* items, int64_t num_items, const int32_t* cu_seqlens,                       \
        const int32_t* lengths, const int32_t* tables, int64_t table_width, int64_t block_size,   \
        int64_t heads, int64_t kv_heads, int64_t dim, float scale, const T* q, int64_t q_stride,  \
        const T* k, const T* v, int64_t kv_stride, const int64_t* slots, int64_t tokens,          \
        T* k_cache, T* v_cache, T* out, int threads) {                                            \
        Attention a{items, cu_seqlens, lengths, tables, table_width, block_size,                  \
                    heads, kv_heads,   dim,     q_stride, scale};                                 \
        attend<T>(a, num_items, q, k, v, kv_stride, slots, tokens, k_cache, v_cache, out,         \
                  threads);                                                                       \
    }                                                                                             \
    extern "C" void rms_norm_##suffix(const T* x, int64_t outer, int64_t inner, int64_t stride,   \
                                      int64_t dim, const T* add, T* sums, const T* weight,        \
                                      float eps, T* out, int threads) {                           \
        rms_norm<T>(x, outer, inner, stride, dim, add, sums, weight, eps, out, threads);          \
    }                                                                                             \
    extern "C" void rotate_##suffix(T* x, int64_t tokens, int64_t heads, int64_t stride,          \
                                    int64_t dim, const T* cos, const T* sin, int threads) {       \
        rotate<T>(x, tokens, heads, stride, dim, cos, sin, threads);                              \
    }                                                                                             \
    extern "C" void silu_mul_##suffix(const T* gate_up, int64_t rows, int64_t width, T* out,      \
                                      int threads) {                                              \
        silu_mul<T>(gate_up, rows, width, out, threads);                                          \
    }

EXPORT(float, float32)
EXPORT(Brain, bfloat16)
