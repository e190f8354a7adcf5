// Polarity-aware linear attention on a CPU, forward and backward, behind a plain C interface (see cpu.py).
//
// The mathematics is that of plain.py, in one sweep over the tokens per pass. Features never leave the cache: a block of tokens
// is read, |x|^p is computed once per element, split by sign while in registers, and consumed.
//
// Safe at every magnitude. With log2|x| = E + F, E an integer and |F| <= 1/2, and for each head, channel and sign an integer
// c = round(p log2 peak), peak the largest |k|:
//     keys     2^(p E - c + p F)                    the largest of a channel and sign is about 1
//     queries  2^(p E + c - shift + p F)            shift an integer near the query's largest exponent
// The integers cancel between keys and queries without rounding, and p E - c is one fused multiply-add, so that no digits are
// lost at 1e+-30 either. The opposite-sign stream reads the peaks and the state of the other sign.
//
// A state has a row for each channel and sign, 2D x W; its columns are the value channels: the same-sign ones, padded to whole
// vectors, then the opposite-sign ones. A query or key uses one row of each pair, the one of its own sign. For the opposite
// stream the rows are swapped once, so that both streams of a query read the same row.
//
// Results do not depend on the number of threads: the number of tokens alone determines the chunks, and chunks are added in order.

#include "vectors.h"

namespace {

constexpr bool MANY = VECTOR_BYTES == 64;  // 32 vector registers, else 16
constexpr int ROWS = MANY ? 8 : 6;         // sums at a time, of two registers each
constexpr int SUMS = MANY ? 16 : 8;        // registers for sums over rows of a state, of one token or more
constexpr double LOWEST = FLOOR / 2;    // an exponent below it belongs to a zero or to an absent key
constexpr double BALANCE = 30;          // see Tables
constexpr int64_t CHUNK = 512;          // minimum number of tokens that one thread sums
constexpr int64_t RUN = 512;            // approximate number of tokens summed one by one: rounding errors grow with it
constexpr int64_t MAX_CHUNKS = 64;      // per head, fewer where their states would take more than PARTIAL_BYTES
constexpr int64_t PARTIAL_BYTES = 4 << 20;
constexpr int64_t BLOCK_BYTES = 16384;  // features of a block of tokens

struct View {  // (batch, heads, tokens, width), strides in elements, the last one is 1
    void* data;
    int64_t batch, head, token;
};

struct Problem {  // the same fields in the same order as in cpu.py
    int64_t batch, heads, queries, keys, width, storage, threads, shifted, poison;
    double eps;
    const double* power;       // (heads, width)
    const double* log2_scale;  // (heads, width) or null
    const uint8_t* mask;       // (batch, keys) or null
    View q, k, v, out, grad, grad_q, grad_k, grad_v;
    void* norms;         // (batch, heads, queries, 2)
    double* grad_power;  // (heads, width)
    double* grad_scale;  // (heads, width): of log2 of the scale
};

// ---- matmuls ----

// state[rows, columns] += featuresᵀ values, for ROWS rows and COLUMNS registers of columns.
// features (tokens, rows, at steps of feature_step), values (tokens, columns).
template <class T, int ROWS, int COLUMNS>
INLINE void add_products(const T* features, int64_t feature_step, const T* values, int64_t value_step, int64_t tokens, T* state,
                         int64_t state_step) {
    R<T> total[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) total[r][c] = load_r(state + r * state_step + c * per<T>);
    for (int64_t t = 0; t < tokens; t++, features += feature_step, values += value_step) {
        R<T> value[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) value[c] = load_r(values + c * per<T>);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < COLUMNS; c++) total[r][c] += features[r] * value[c];
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) store_r<T>(state + r * state_step + c * per<T>, total[r][c]);
}
template <class T, int COLUMNS>
void add_columns(const T* features, int64_t rows, const T* values, int64_t value_step, int64_t tokens, T* state,
                 int64_t state_step) {
    constexpr int TALL = COLUMNS == 1 ? 2 * ROWS : ROWS;
    int64_t r = 0;
    for (; r + TALL <= rows; r += TALL)
        add_products<T, TALL, COLUMNS>(features + r, rows, values, value_step, tokens, state + r * state_step, state_step);
    for (; r < rows; r += 2)
        add_products<T, 2, COLUMNS>(features + r, rows, values, value_step, tokens, state + r * state_step, state_step);
}

// All rows of a state, an even number, and `columns` of its columns. features (tokens, rows).
template <class T>
void accumulate(const T* features, int64_t rows, const T* values, int64_t value_step, int64_t tokens, T* state, int64_t columns,
                int64_t state_step) {
    constexpr int64_t L = per<T>;
    int64_t c = 0;
    for (; c + 2 * L <= columns; c += 2 * L) add_columns<T, 2>(features, rows, values + c, value_step, tokens, state + c, state_step);
    for (; c < columns; c += L) add_columns<T, 1>(features, rows, values + c, value_step, tokens, state + c, state_step);
}

// total[u] += Σ_d weight[u, d] · the row of channel d and sign of token u.
// rows (width, 2, step); sign_step (tokens, width): from the row of channel d to that of its sign, 0 or `step`.
template <class T, int TOKENS, int COLUMNS>
INLINE void add_rows(const T* rows, int64_t step, int64_t width, const T* weight, const typename Lanes<T>::Int* sign_step,
                     R<T> (&total)[TOKENS][COLUMNS]) {
    for (int64_t d = 0; d < width; d++, rows += 2 * step)
        for (int u = 0; u < TOKENS; u++) {
            const T* row = rows + sign_step[u * width + d];
            const T w = weight[u * width + d];
            for (int c = 0; c < COLUMNS; c++) total[u][c] += w * load_r(row + c * per<T>);
        }
}

// The rows to read, and where their sums go. factor (tokens, 2) or null: multiplies a token's sums, the first one those of the
// columns before `boundary`, the second one the others.
template <class T> struct Rows {
    const T* rows;  // (width, 2, step)
    int64_t step, width, boundary;
    const T* factor;
    T* result;  // (tokens, columns)
    int64_t result_step;
};
template <class T, int TOKENS, int COLUMNS>
INLINE void apply_tile(const Rows<T>& r, int64_t column, int64_t token, const T* weight, const typename Lanes<T>::Int* sign_step) {
    R<T> total[TOKENS][COLUMNS];
#pragma GCC unroll 16
    for (int u = 0; u < TOKENS; u++)
        for (int c = 0; c < COLUMNS; c++) total[u][c] = R<T>{};
    add_rows<T, TOKENS, COLUMNS>(r.rows + column, r.step, r.width, weight + token * r.width, sign_step + token * r.width, total);
    T* const result = r.result + token * r.result_step + column;
#pragma GCC unroll 16
    for (int u = 0; u < TOKENS; u++)
#pragma GCC unroll 16
        for (int c = 0; c < COLUMNS; c++) {
            const T factor = r.factor ? r.factor[2 * (token + u) + (column + c * per<T> >= r.boundary)] : T(1);
            store_r<T>(result + u * r.result_step + c * per<T>, total[u][c] * factor);
        }
}
template <class T, int TOKENS, int COLUMNS>
void apply_columns(const Rows<T>& r, int64_t column, int64_t tokens, const T* weight, const typename Lanes<T>::Int* sign_step) {
    int64_t t = 0;
    for (; t + TOKENS <= tokens; t += TOKENS) apply_tile<T, TOKENS, COLUMNS>(r, column, t, weight, sign_step);
    for (; t < tokens; t++) apply_tile<T, 1, COLUMNS>(r, column, t, weight, sign_step);
}
// Columns first..last of the result, for all tokens.
template <class T>
void apply(const Rows<T>& r, int64_t first, int64_t last, int64_t tokens, const T* weight, const typename Lanes<T>::Int* sign_step) {
    constexpr int64_t L = per<T>;
    int64_t c = first;
    for (; c + 8 * L <= last; c += 8 * L) apply_columns<T, SUMS / 8, 8>(r, c, tokens, weight, sign_step);
    for (; c + 4 * L <= last; c += 4 * L) apply_columns<T, SUMS / 4, 4>(r, c, tokens, weight, sign_step);
    for (; c + 2 * L <= last; c += 2 * L) apply_columns<T, SUMS / 2, 2>(r, c, tokens, weight, sign_step);
    for (; c < last; c += L) apply_columns<T, SUMS / 2, 1>(r, c, tokens, weight, sign_step);
}

// result (tokens, width) = Σ_e values[t, e] · the row (channel, sign of x[t, channel])[e], over columns first..last.
// transposed (columns, width / per, 2, per): both signs side by side.
template <class T, int TOKENS>
INLINE void project_tile(const T* transposed, int64_t width, int64_t first, int64_t last, const T* values, int64_t value_step,
                         const T* x, int64_t step, T* result) {
    constexpr int64_t L = per<T>;
    for (int64_t d = 0; d < width; d += L) {
        R<T> plus[TOKENS] = {}, minus[TOKENS] = {};
        for (int64_t e = first; e < last; e++) {
            const T* pair = transposed + e * 2 * width + 2 * d;
            const R<T> a = load_r(pair), b = load_r(pair + L);
            for (int u = 0; u < TOKENS; u++) {
                const T value = values[u * value_step + e];
                plus[u] += value * a;
                minus[u] += value * b;
            }
        }
        for (int u = 0; u < TOKENS; u++) store_r<T>(result + u * width + d, load_r(x + u * step + d) < T(0) ? minus[u] : plus[u]);
    }
}
template <class T>
void project(const T* transposed, int64_t width, int64_t first, int64_t last, const T* values, int64_t value_step, const T* x,
             int64_t step, int64_t tokens, T* result) {
    int64_t t = 0;
    for (; t + ROWS <= tokens; t += ROWS)
        project_tile<T, ROWS>(transposed, width, first, last, values + t * value_step, value_step, x + t * step, step, result + t * width);
    for (; t < tokens; t++)
        project_tile<T, 1>(transposed, width, first, last, values + t * value_step, value_step, x + t * step, step, result + t * width);
}

// ---- the passes over one head ----

template <class T> struct Sizes {
    int64_t batch, heads, queries, keys, width, storage;
    int64_t half, padded, same, columns, block;  // padded width; columns of the same-sign stream and of both, padded
    bool direct;                                 // rows are used in place: no conversion, no padding

    explicit Sizes(const Problem& p)
        : batch(p.batch), heads(p.heads), queries(p.queries), keys(p.keys), width(p.width), storage(p.storage) {
        half = (width + 1) / 2;
        padded = round_up(width, lanes<T>);
        same = round_up(half, per<T>);
        columns = same + round_up(width - half, per<T>);
        block = std::clamp<int64_t>(BLOCK_BYTES / int64_t(2 * padded * sizeof(T)), 16, 128) / 4 * 4;
        direct = storage == (sizeof(T) == 4 ? FLOAT32 : FLOAT64) && padded == width && same == half && columns == width;
    }
    int64_t chunk(int64_t tokens) const {
        const int64_t most = std::clamp<int64_t>(PARTIAL_BYTES / (2 * padded * columns * int64_t(sizeof(T))), 8, MAX_CHUNKS);
        return round_up(std::max(CHUNK, (tokens + most - 1) / most), block);
    }
    int64_t num_chunks(int64_t tokens) const { return (tokens + chunk(tokens) - 1) / chunk(tokens); }
};

// What a head needs independently of the input: (padded,) each.
template <class T> struct Powers {
    T *p, *scale_whole, *scale_rest;  // exponents; -2 p log2(scale) as an integer and the rest
    T* two_log_scale;                 // 2 log2(scale)
    Powers(Arena& arena, const Sizes<T>& s) {
        for (T** table : {&p, &scale_whole, &scale_rest, &two_log_scale}) *table = arena.take<T>(s.padded);
    }
    void fill(const Problem& problem, const Sizes<T>& s, int64_t head) {
        for (int64_t d = 0; d < s.padded; d++) {
            const int64_t at = head * s.width + d;
            const double power = d < s.width ? problem.power[at] : 1.0;
            const double log_scale = d < s.width && problem.log2_scale ? problem.log2_scale[at] : 0.0;
            const double exponent = -2 * power * log_scale;
            p[d] = T(power);
            scale_whole[d] = T(std::nearbyint(exponent));
            scale_rest[d] = T(exponent - std::nearbyint(exponent));
            two_log_scale[d] = T(2 * log_scale);
        }
    }
    static int64_t bytes(const Sizes<T>& s) { return 4 * round_up(s.padded * sizeof(T), 64); }
};

// What queries need of a head's keys and values. Tables by sign are (2, padded): positive, then negative channels.
template <class T> struct Memory {
    T *peak;      // (2, padded): largest |k|, 0 where there is none
    T *state;     // (2 padded, columns): Σ features ⊗ v
    T *total;     // (2, padded): Σ features
    Memory() = default;
    Memory(Arena& arena, const Sizes<T>& s)
        : peak(arena.take<T>(2 * s.padded)), state(arena.take<T>(2 * s.padded * s.columns)), total(arena.take<T>(2 * s.padded)) {}
    static int64_t bytes(const Sizes<T>& s) {
        return 2 * round_up(2 * s.padded * sizeof(T), 64) + round_up(2 * s.padded * s.columns * sizeof(T), 64);
    }
    void clear(const Sizes<T>& s) {
        std::fill_n(state, 2 * s.padded * s.columns, T(0));
        std::fill_n(total, 2 * s.padded, T(0));
    }
    void add(const Memory& other, const Sizes<T>& s) {
        for (int64_t i = 0; i < 2 * s.padded * s.columns; i++) state[i] += other.state[i];
        for (int64_t i = 0; i < 2 * s.padded; i++) total[i] += other.total[i];
    }
    void move_from(Memory& part, const Sizes<T>& s) {
        add(part, s);
        part.clear(s);
    }
};

// The same, arranged for use: rows by channel and sign, swapped for the opposite stream, and integer exponents.
template <class T> struct Tables {
    T *exponent;        // (2, padded): c, FLOOR where there is no key; equal for both signs if balanced
    T *for_queries;     // (2, padded): the same plus the scale's integer part
    bool balanced;      // the peaks of both signs are of similar size, so that one weight serves both streams of a query
    T *log_peak;        // (2, padded): log2 of the peak, 0 where there is none
    T *same, *opposite; // (2, padded): totals of the query's own sign and of the other
    T *rows;            // (padded, 2, columns)
    T *transposed;      // (columns, padded / per, 2, per)
    Tables() = default;
    Tables(Arena& arena, const Sizes<T>& s) {
        for (T** table : {&exponent, &for_queries, &log_peak, &same, &opposite}) *table = arena.take<T>(2 * s.padded);
        rows = arena.take<T>(2 * s.padded * s.columns);
        transposed = arena.take<T>(2 * s.padded * s.columns);
    }
    static int64_t bytes(const Sizes<T>& s) {
        return 5 * round_up(2 * s.padded * sizeof(T), 64) + 2 * round_up(2 * s.padded * s.columns * sizeof(T), 64);
    }
    void set_peaks(const T* peak, const Powers<T>& powers, const Sizes<T>& s, bool shifted) {
        for (int64_t i = 0; i < 2 * s.padded; i++) {
            const T p = powers.p[i % s.padded];
            log_peak[i] = peak[i] == 0 || !shifted ? T(0) : std::log2(peak[i]);
            exponent[i] = !shifted ? T(0) : peak[i] == 0 ? T(FLOOR) : std::nearbyint(p * log_peak[i]);
        }
        // With the larger peak for both, the smaller sign's largest feature is at least 2^-BALANCE, and so is every denominator;
        // whatever then underflows is smaller by a factor of 2^-90 in float.
        balanced = true;
        for (int64_t d = 0; d < s.padded; d++) balanced = balanced && std::abs(exponent[d] - exponent[s.padded + d]) <= BALANCE;
        for (int64_t d = 0; balanced && d < s.padded; d++)
            exponent[d] = exponent[s.padded + d] = std::max(exponent[d], exponent[s.padded + d]);
        for (int64_t i = 0; i < 2 * s.padded; i++) for_queries[i] = exponent[i] + powers.scale_whole[i % s.padded];
    }
    // Swapped: the columns of the opposite stream come from the other sign.
    void set_rows(const T* state, const Sizes<T>& s) {
        for (int64_t d = 0; d < s.padded; d++)
            for (int64_t sign = 0; sign < 2; sign++) {
                T* row = rows + (2 * d + sign) * s.columns;
                const int64_t other = 1 - sign;
                std::copy_n(state + (sign * s.padded + d) * s.columns, s.same, row);
                std::copy_n(state + (other * s.padded + d) * s.columns + s.same, s.columns - s.same, row + s.same);
            }
    }
    void set_totals(const T* total, const Sizes<T>& s) {
        std::copy_n(total, 2 * s.padded, same);
        std::copy_n(total + s.padded, s.padded, opposite);
        std::copy_n(total, s.padded, opposite + s.padded);
    }
    void transpose(const Sizes<T>& s) {
        constexpr int64_t L = per<T>;
        for (int64_t e = 0; e < s.columns; e++)
            for (int64_t d = 0; d < s.padded; d++)
                for (int64_t sign = 0; sign < 2; sign++)
                    transposed[e * 2 * s.padded + d / L * 2 * L + sign * L + d % L] = rows[(2 * d + sign) * s.columns + e];
    }
};

// A thread's working memory for one block of tokens.
template <class T> struct Scratch {
    T *x, *values, *result;        // (block, padded), (block, columns) twice
    T *weight, *other;             // (block, padded): same-sign and opposite-sign weights
    T *features, *other_features;  // (block, 2, padded): weights by sign
    T *whole, *rest;               // (block, padded): log2|x| in two parts
    T *toward, *away;              // (block, padded): products with a state, for the same-sign and the opposite-sign stream
    T *tops, *other_tops;          // (block, lanes): largest exponents, then shifts
    T *factor;                     // (block, 2)
    T *slope;                      // (6, padded): sums over tokens
    typename Lanes<T>::Int* sign_step;  // (block, padded): from a positive channel's row of a state to the negative one's if x < 0, else 0
    int64_t* index;                // (chunk,): the tokens that exist
    double* sums;                  // (2, padded)
    Memory<T> part;                // sums of a run of tokens
    Scratch(Arena& arena, const Sizes<T>& s, int64_t longest) {
        for (T** tokens : {&x, &weight, &other, &whole, &rest, &toward, &away}) *tokens = arena.take<T>(s.block * s.padded);
        values = arena.take<T>(s.block * s.columns);
        result = arena.take<T>(s.block * s.columns);
        features = arena.take<T>(s.block * 2 * s.padded);
        other_features = arena.take<T>(s.block * 2 * s.padded);
        tops = arena.take<T>(s.block * lanes<T>);
        other_tops = arena.take<T>(s.block * lanes<T>);
        factor = arena.take<T>(2 * s.block);
        slope = arena.take<T>(6 * s.padded);
        sign_step = arena.take<typename Lanes<T>::Int>(s.block * s.padded);
        index = arena.take<int64_t>(longest);
        sums = arena.take<double>(2 * s.padded);
        part = Memory<T>(arena, s);
    }
    static int64_t bytes(const Sizes<T>& s, int64_t longest) {
        return Memory<T>::bytes(s) + (8 * s.block * s.padded + 2 * s.block * s.columns + 4 * s.block * s.padded + 2 * s.block * (1 + lanes<T>) + 6 * s.padded) * sizeof(T) +
               8 * longest + 16 * s.padded + 20 * 64;
    }
};

// Some consecutive tokens of one head, or, under a mask, some of its indices.
struct Span {
    int64_t first, count;
    const int64_t* index;  // null: first, first + 1, …
    int64_t at(int64_t t) const { return index ? index[first + t] : first + t; }
};

inline int64_t offset(const View& view, int64_t batch, int64_t head, int64_t token) {
    return batch * view.batch + head * view.head + token * view.token;
}

// The rows of a span, `step` apart, if they can be used in place, else null.
template <class T>
const T* in_place(const View& view, const Sizes<T>& s, int64_t batch, int64_t head, const Span& span, int64_t& step) {
    if (!s.direct || span.index) return nullptr;
    step = view.token;
    return static_cast<const T*>(view.data) + offset(view, batch, head, span.first);
}

// Rows (count, padded) of q or k: in place, or converted and padded with zeros into `scratch`.
template <class T>
const T* rows_of(const View& view, const Sizes<T>& s, int64_t batch, int64_t head, const Span& span, T* scratch, int64_t& step) {
    if (const T* rows = in_place(view, s, batch, head, span, step)) return rows;
    step = s.padded;
    for (int64_t t = 0; t < span.count; t++) {
        widen(view.data, offset(view, batch, head, span.at(t)), s.storage, s.width, scratch + t * s.padded);
        std::fill(scratch + t * s.padded + s.width, scratch + (t + 1) * s.padded, T(0));
    }
    return scratch;
}

// Rows (count, columns) of v or of a gradient: the two streams, each padded with zeros.
template <class T>
const T* streams_of(const View& view, const Sizes<T>& s, int64_t batch, int64_t head, const Span& span, T* scratch, int64_t& step) {
    if (const T* rows = in_place(view, s, batch, head, span, step)) return rows;
    step = s.columns;
    for (int64_t t = 0; t < span.count; t++) {
        T* row = scratch + t * s.columns;
        const int64_t from = offset(view, batch, head, span.at(t));
        std::fill_n(row, s.columns, T(0));
        widen(view.data, from, s.storage, s.half, row);
        widen(view.data, from + s.half, s.storage, s.width - s.half, row + s.same);
    }
    return scratch;
}
template <class T>
void store_streams(const T* scratch, const View& view, const Sizes<T>& s, int64_t batch, int64_t head, const Span& span) {
    for (int64_t t = 0; t < span.count; t++) {
        const int64_t to = offset(view, batch, head, span.at(t));
        narrow(scratch + t * s.columns, s.half, view.data, to, s.storage);
        narrow(scratch + t * s.columns + s.same, s.width - s.half, view.data, to + s.half, s.storage);
    }
}
template <class T>
void store_rows(const T* scratch, const View& view, const Sizes<T>& s, int64_t batch, int64_t head, const Span& span) {
    for (int64_t t = 0; t < span.count; t++)
        narrow(scratch + t * s.padded, s.width, view.data, offset(view, batch, head, span.at(t)), s.storage);
}
template <class T>
void store_zeros(const View& view, const Sizes<T>& s, int64_t batch, int64_t head, int64_t token, T* zeros) {
    std::fill_n(zeros, s.width, T(0));
    narrow(zeros, s.width, view.data, offset(view, batch, head, token), s.storage);
}

template <class T> struct Head {
    const Problem& problem;
    const Sizes<T>& s;
    const Powers<T>& powers;
    int64_t batch, head;

    const uint8_t* mask() const { return problem.mask ? problem.mask + batch * s.keys : nullptr; }
    int64_t num_keys() const {
        return mask() ? std::count_if(mask(), mask() + s.keys, [](uint8_t m) { return m != 0; }) : s.keys;
    }
    int64_t last(int64_t tokens, int64_t chunk) const { return std::min(tokens, (chunk + 1) * s.chunk(tokens)); }

    // Pass the existing keys of a chunk to `use`, in blocks.
    template <class Use> void for_key_blocks(int64_t chunk, Scratch<T>& scratch, Use use) const {
        const int64_t begin = chunk * s.chunk(s.keys), end = last(s.keys, chunk);
        int64_t count = end - begin;
        if (mask()) {
            count = 0;
            for (int64_t t = begin; t < end; t++)
                if (mask()[t]) scratch.index[count++] = t;
        }
        const int64_t* index = mask() ? scratch.index : nullptr;
        for (int64_t t = 0; t < count; t += s.block)
            use(Span{index ? t : begin + t, std::min(s.block, count - t), index});
    }

    // The largest |k| of each channel and sign in a chunk, into peak (2, padded); NaN where a key is not finite.
    void find_peaks(int64_t chunk, Scratch<T>& scratch, T* peak) const {
        std::fill_n(peak, 2 * s.padded, T(0));
        for_key_blocks(chunk, scratch, [&](Span span) {
            int64_t step;
            const T* x = rows_of(problem.k, s, batch, head, span, scratch.x, step);
            for (int64_t d = 0; d < s.padded; d += lanes<T>) {
                V<T> high = load(peak + d), low = load(peak + s.padded + d), broken = {};
                for (int64_t t = 0; t < span.count; t++) {
                    const V<T> k = load(x + t * step + d);
                    high = larger<T>(k, high);
                    low = larger<T>(splat<T>(T(0)) - k, low);
                    broken += k - k;
                }
                store<T>(peak + d, high + broken);
                store<T>(peak + s.padded + d, low + broken);
            }
        });
    }

    // The features of some keys, and their sum into total (2, padded); with KEEP their weights, signs and logarithms instead. In
    // all such loops sizes and addresses are local variables: otherwise the compiler must assume that a store changes them.
    template <bool KEEP>
    void weigh_keys(const T* x, int64_t step, int64_t count, const Tables<T>& tables, Scratch<T>& scratch, T* total) const {
        const int64_t padded = s.padded, columns = s.columns;
        const T *power = powers.p, *plus = tables.exponent, *minus = plus + padded;
        T *features = scratch.features, *weight = scratch.weight, *whole = scratch.whole, *rest = scratch.rest;
        typename Lanes<T>::Int* sign_step = scratch.sign_step;
        for (int64_t t = 0; t < count; t++)
            for (int64_t d = 0; d < padded; d += lanes<T>) {
                const V<T> k = load(x + t * step + d), p = load(power + d);
                const I<T> negative = below<T>(k, T(0));
                V<T> E, F;
                split_log2<T>(k, E, F);
                const V<T> w = exp2<T>((p * E - choose<T>(negative, load(minus + d), load(plus + d))) + p * F);
                const V<T> positive_part = except<T>(negative, w), negative_part = where<T>(negative, w);
                if (KEEP) {
                    store<T>(weight + t * padded + d, w);
                    store<T>(whole + t * padded + d, E);
                    store<T>(rest + t * padded + d, F);
                    store<T>(sign_step + t * padded + d, negative & typename Lanes<T>::Int(columns));
                } else {
                    store<T>(features + 2 * t * padded + d, positive_part);
                    store<T>(features + (2 * t + 1) * padded + d, negative_part);
                    store<T>(total + d, load(total + d) + positive_part);
                    store<T>(total + padded + d, load(total + padded + d) + negative_part);
                }
            }
    }

    // Σ features ⊗ v and Σ features of a chunk.
    void summarise(int64_t chunk, Scratch<T>& scratch, const Tables<T>& tables, Memory<T>& memory) const {
        memory.clear(s);
        scratch.part.clear(s);
        int64_t summed = 0;
        for_key_blocks(chunk, scratch, [&](Span span) {
            int64_t step;
            const T* x = rows_of(problem.k, s, batch, head, span, scratch.x, step);
            weigh_keys<false>(x, step, span.count, tables, scratch, scratch.part.total);
            const T* values = streams_of(problem.v, s, batch, head, span, scratch.values, step);
            accumulate(scratch.features, 2 * s.padded, values, step, span.count, scratch.part.state, s.columns, s.columns);
            if ((summed += span.count) >= RUN) {
                memory.move_from(scratch.part, s);
                summed = 0;
            }
        });
        memory.move_from(scratch.part, s);
    }

    // n eps in the units of a denominator that was shifted by `shift`.
    T shifted_eps(double log2_added, T shift) const { return problem.eps > 0 ? T(std::exp2(log2_added - double(shift))) : T(0); }

    // Weights of some queries for both streams, with signs, and their denominators into norms (count, 2) unless null.
    // BALANCED: one weight for both streams. Not SHIFTED: without shifts.
    template <bool BALANCED, bool SHIFTED>
    void weigh_queries(const T* x, int64_t step, int64_t count, const Tables<T>& tables, double log2_added, Scratch<T>& scratch,
                       T* norms) const {
        const int64_t padded = s.padded, columns = s.columns;
        const T *power = powers.p, *scale_rest = powers.scale_rest;
        const T *plus = tables.for_queries, *minus = plus + padded, *same = tables.same, *opposite = tables.opposite;
        T *weight = scratch.weight, *others = scratch.other;
        typename Lanes<T>::Int* sign_step = scratch.sign_step;
        T *whole = scratch.whole, *rest = scratch.rest, *tops = scratch.tops, *other_tops = scratch.other_tops;
        for (int64_t t = 0; t < count; t++) {
            V<T> top = splat<T>(T(LOWEST)), other_top = top;
            for (int64_t d = 0; d < padded; d += lanes<T>) {
                const V<T> q = load(x + t * step + d), p = load(power + d);
                const I<T> negative = below<T>(q, T(0));
                V<T> E, F;
                split_log2<T>(q, E, F);
                store<T>(whole + t * padded + d, E);
                store<T>(rest + t * padded + d, F);
                store<T>(sign_step + t * padded + d, negative & typename Lanes<T>::Int(columns));
                if (!SHIFTED) continue;
                const V<T> exponent = p * (E + F);
                top = larger<T>(exponent + (BALANCED ? load(plus + d) : choose<T>(negative, load(minus + d), load(plus + d))), top);
                if (!BALANCED) other_top = larger<T>(exponent + choose<T>(negative, load(plus + d), load(minus + d)), other_top);
            }
            store<T>(tops + t * lanes<T>, top);
            if (!BALANCED) store<T>(other_tops + t * lanes<T>, other_top);
        }
        for (int64_t t = 0; t < count; t++) {  // tops become shifts
            store<T>(tops + t * lanes<T>, SHIFTED ? nearest_whole<T>(splat<T>(largest<T>(load(tops + t * lanes<T>)))) : V<T>{});
            if (!BALANCED)
                store<T>(other_tops + t * lanes<T>, nearest_whole<T>(splat<T>(largest<T>(load(other_tops + t * lanes<T>)))));
        }
        T *norm_parts = scratch.toward, *other_parts = scratch.away;
        for (int64_t t = 0; t < count; t++) {
            const V<T> shift = load(tops + t * lanes<T>), other_shift = BALANCED ? shift : load(other_tops + t * lanes<T>);
            V<T> norm = {}, other_norm = {};
            for (int64_t d = 0; d < padded; d += lanes<T>) {
                const V<T> p = load(power + d), E = load(whole + t * padded + d);
                const I<T> negative = below<T>(load(x + t * step + d), T(0));
                const V<T> fraction = p * load(rest + t * padded + d) + load(scale_rest + d);
                const V<T> c = BALANCED ? load(plus + d) : choose<T>(negative, load(minus + d), load(plus + d));
                const V<T> w = exp2<T>((p * E + (c - shift)) + fraction);
                V<T> o = w;
                if (!BALANCED) {
                    const V<T> other = choose<T>(negative, load(plus + d), load(minus + d));
                    o = exp2<T>((p * E + (other - other_shift)) + fraction);
                    store<T>(others + t * padded + d, o);
                }
                store<T>(weight + t * padded + d, w);
                norm += w * choose<T>(negative, load(same + padded + d), load(same + d));
                other_norm += o * choose<T>(negative, load(opposite + padded + d), load(opposite + d));
            }
            store<T>(norm_parts + t * padded, norm);
            store<T>(other_parts + t * padded, other_norm);
        }
        for (int64_t t = 0; norms && t < count; t++) {
            const T shift = tops[t * lanes<T>], other_shift = BALANCED ? shift : other_tops[t * lanes<T>];
            norms[2 * t] = sum<T>(load(norm_parts + t * padded)) + shifted_eps(log2_added, shift);
            norms[2 * t + 1] = sum<T>(load(other_parts + t * padded)) + shifted_eps(log2_added, other_shift);
        }
    }
    void weigh_any_queries(const T* x, int64_t step, int64_t count, const Tables<T>& tables, double log2_added, Scratch<T>& scratch,
                           T* norms) const {
        if (!problem.shifted) weigh_queries<true, false>(x, step, count, tables, log2_added, scratch, norms);
        else if (tables.balanced) weigh_queries<true, true>(x, step, count, tables, log2_added, scratch, norms);
        else weigh_queries<false, true>(x, step, count, tables, log2_added, scratch, norms);
    }

    // The output and the denominators of a chunk of queries.
    void attend(int64_t chunk, Scratch<T>& scratch, const Tables<T>& tables, double log2_added) const {
        const int64_t end = last(s.queries, chunk);
        for (int64_t first = chunk * s.chunk(s.queries); first < end; first += s.block) {
            const Span span{first, std::min(s.block, end - first), nullptr};
            int64_t step;
            const T* x = rows_of(problem.q, s, batch, head, span, scratch.x, step);
            T* norms = static_cast<T*>(problem.norms) + ((batch * s.heads + head) * s.queries + first) * 2;
            weigh_any_queries(x, step, span.count, tables, log2_added, scratch, norms);
            for (int64_t i = 0; i < 2 * span.count; i++) scratch.factor[i] = norms[i] == 0 ? T(0) : T(1) / norms[i];
            Rows<T> rows{tables.rows, s.columns, s.padded, s.same, scratch.factor, scratch.result, s.columns};
            if (s.direct) {
                rows.result = static_cast<T*>(problem.out.data) + offset(problem.out, batch, head, first);
                rows.result_step = problem.out.token;
            }
            const bool one = tables.balanced;
            apply(rows, 0, one ? s.columns : s.same, span.count, scratch.weight, scratch.sign_step);
            if (!one) apply(rows, s.same, s.columns, span.count, scratch.other, scratch.sign_step);
            if (!s.direct) store_streams(scratch.result, problem.out, s, batch, head, span);
        }
    }

    // The gradients of a chunk of queries: of q, and the sums of those of the swapped state, its totals, power and scale.
    // scratch.slope (2, 2, padded): gradients of the totals of the query's sign and of the other one, by the query's sign.
    void attend_backward(int64_t chunk, Scratch<T>& scratch, const Tables<T>& tables, Memory<T>& gradient) const {
        const int64_t end = last(s.queries, chunk);
        gradient.clear(s);
        scratch.part.clear(s);
        std::fill_n(scratch.slope, 4 * s.padded, T(0));
        std::fill_n(scratch.sums, 2 * s.padded, 0.0);
        int64_t summed = 0;
        for (int64_t first = chunk * s.chunk(s.queries); first < end; first += s.block) {
            const Span span{first, std::min(s.block, end - first), nullptr};
            int64_t step, grad_step;
            const T* x = rows_of(problem.q, s, batch, head, span, scratch.x, step);
            const T* grad = streams_of(problem.grad, s, batch, head, span, scratch.values, grad_step);
            weigh_any_queries(x, step, span.count, tables, 0.0, scratch, nullptr);
            project(tables.transposed, s.padded, int64_t(0), s.same, grad, grad_step, x, step, span.count, scratch.toward);
            project(tables.transposed, s.padded, s.same, s.columns, grad, grad_step, x, step, span.count, scratch.away);
            const T* norms = static_cast<const T*>(problem.norms) + ((batch * s.heads + head) * s.queries + first) * 2;
            query_gradients(x, step, span.count, norms, tables, scratch);
            store_rows(scratch.toward, problem.grad_q, s, batch, head, span);
            accumulate(scratch.features, 2 * s.padded, grad, grad_step, span.count, scratch.part.state, s.same, s.columns);
            accumulate(scratch.other_features, 2 * s.padded, grad + s.same, grad_step, span.count, scratch.part.state + s.same,
                       s.columns - s.same, s.columns);
            if ((summed += span.count) >= RUN || first + span.count == end) {
                move_slopes(scratch);
                gradient.move_from(scratch.part, s);
                summed = 0;
            }
        }
    }
    void move_slopes(Scratch<T>& scratch) const {
        for (int64_t d = 0; d < s.padded; d++) {
            scratch.part.total[d] = scratch.slope[d] + scratch.slope[3 * s.padded + d];
            scratch.part.total[s.padded + d] = scratch.slope[s.padded + d] + scratch.slope[2 * s.padded + d];
        }
        std::fill_n(scratch.slope, 4 * s.padded, T(0));
    }

    // In: weights, and products of the gradients with the state in toward and away. Out: the gradient of q in toward.
    void query_gradients(const T* x, int64_t step, int64_t count, const T* norms, const Tables<T>& tables, Scratch<T>& scratch) const {
        const int64_t padded = s.padded;
        const T *power = powers.p, *two_log_scale = powers.two_log_scale, *log_peak = tables.log_peak;
        const T *totals = tables.same, *other_totals = tables.opposite, *weight = scratch.weight;
        const T *whole = scratch.whole, *rest = scratch.rest;
        T *features = scratch.features, *other_features = scratch.other_features, *slope_sums = scratch.slope;
        const T* others = tables.balanced ? scratch.weight : scratch.other;
        T* power_sum = slope_sums + 4 * padded;
        std::fill_n(power_sum, 2 * padded, T(0));
        for (int64_t t = 0; t < count; t++) {
            const T inverse = norms[2 * t] == 0 ? T(0) : T(1) / norms[2 * t];
            const T other_inverse = norms[2 * t + 1] == 0 ? T(0) : T(1) / norms[2 * t + 1];
            T *toward = scratch.toward + t * padded, *away = scratch.away + t * padded;
            V<T> total = {}, other_total = {};
            for (int64_t d = 0; d < padded; d += lanes<T>) {
                const V<T> w = load(weight + t * padded + d) * inverse, o = load(others + t * padded + d) * other_inverse;
                const V<T> numerator = w * load(toward + d), other_numerator = o * load(away + d);
                store<T>(toward + d, numerator);
                store<T>(away + d, other_numerator);
                total += numerator;
                other_total += other_numerator;
            }
            const T slope = -sum<T>(total), other_slope = -sum<T>(other_total);
            for (int64_t d = 0; d < padded; d += lanes<T>) {
                const V<T> q = load(x + t * step + d), p = load(power + d);
                const I<T> negative = below<T>(q, T(0));
                const V<T> w = load(weight + t * padded + d) * inverse, o = load(others + t * padded + d) * other_inverse;
                const V<T> same = choose<T>(negative, load(totals + padded + d), load(totals + d));
                const V<T> opposite = choose<T>(negative, load(other_totals + padded + d), load(other_totals + d));
                const V<T> g = load(toward + d) + w * same * slope, h = load(away + d) + o * opposite * other_slope;
                const V<T> both = g + h;
                store<T>(toward + d, except<T>(tiny<T>(q), both * p / q));
                const V<T> log = load(whole + t * padded + d) + load(rest + t * padded + d) - load(two_log_scale + d);
                const V<T> plus = load(log_peak + d), minus = load(log_peak + padded + d);
                const V<T> change = g * (log + choose<T>(negative, minus, plus)) + h * (log + choose<T>(negative, plus, minus));
                store<T>(power_sum + d, load(power_sum + d) + except<T>(equal<T>(q, T(0)), change));
                store<T>(power_sum + padded + d, load(power_sum + padded + d) + both);
                store<T>(features + 2 * t * padded + d, except<T>(negative, w));
                store<T>(features + (2 * t + 1) * padded + d, where<T>(negative, w));
                store<T>(other_features + 2 * t * padded + d, except<T>(negative, o));
                store<T>(other_features + (2 * t + 1) * padded + d, where<T>(negative, o));
                T* slopes = slope_sums + d;
                store<T>(slopes, load(slopes) + except<T>(negative, w * slope));
                store<T>(slopes + padded, load(slopes + padded) + where<T>(negative, w * slope));
                store<T>(slopes + 2 * padded, load(slopes + 2 * padded) + except<T>(negative, o * other_slope));
                store<T>(slopes + 3 * padded, load(slopes + 3 * padded) + where<T>(negative, o * other_slope));
            }
        }
        for (int64_t d = 0; d < 2 * padded; d++) scratch.sums[d] += double(power_sum[d]);
    }

    // The gradients of k and v of a chunk, and the sum of that of power in scratch.sums (padded,).
    // tables: of the keys; gradients: rows and totals ("same") of the gradient of the state.
    void keys_backward(int64_t chunk, Scratch<T>& scratch, const Tables<T>& tables, const Tables<T>& gradients) const {
        std::fill_n(scratch.sums, 2 * s.padded, 0.0);
        if (mask()) {
            for (int64_t t = chunk * s.chunk(s.keys); t < last(s.keys, chunk); t++)
                if (!mask()[t]) {
                    store_zeros(problem.grad_k, s, batch, head, t, scratch.x);
                    store_zeros(problem.grad_v, s, batch, head, t, scratch.x);
                }
        }
        for_key_blocks(chunk, scratch, [&](Span span) {
            int64_t step, value_step;
            const T* x = rows_of(problem.k, s, batch, head, span, scratch.x, step);
            const T* values = streams_of(problem.v, s, batch, head, span, scratch.values, value_step);
            weigh_keys<true>(x, step, span.count, tables, scratch, nullptr);
            project(gradients.transposed, s.padded, int64_t(0), s.columns, values, value_step, x, step, span.count, scratch.toward);
            const Rows<T> rows{gradients.rows, s.columns, s.padded, 0, nullptr, scratch.result, s.columns};
            apply(rows, 0, s.columns, span.count, scratch.weight, scratch.sign_step);
            store_streams(scratch.result, problem.grad_v, s, batch, head, span);
            key_gradients(x, step, span.count, tables, gradients, scratch);
            store_rows(scratch.toward, problem.grad_k, s, batch, head, span);
        });
    }

    void key_gradients(const T* x, int64_t step, int64_t count, const Tables<T>& tables, const Tables<T>& gradients, Scratch<T>& scratch) const {
        const int64_t padded = s.padded;
        const T *power = powers.p, *log_peak = tables.log_peak, *totals = gradients.same;
        const T *weight = scratch.weight, *whole = scratch.whole, *rest = scratch.rest;
        T* products = scratch.toward;
        T* power_sum = scratch.away;
        std::fill_n(power_sum, padded, T(0));
        for (int64_t t = 0; t < count; t++)
            for (int64_t d = 0; d < padded; d += lanes<T>) {
                const V<T> k = load(x + t * step + d), p = load(power + d), w = load(weight + t * padded + d);
                const I<T> negative = below<T>(k, T(0));
                T* toward = products + t * padded + d;
                const V<T> total = choose<T>(negative, load(totals + padded + d), load(totals + d));
                const V<T> g = w * (load(toward) + total);
                store<T>(toward, except<T>(tiny<T>(k), g * p / k));
                const V<T> peak = choose<T>(negative, load(log_peak + padded + d), load(log_peak + d));
                const V<T> log = load(whole + t * padded + d) + load(rest + t * padded + d) - peak;
                store<T>(power_sum + d, load(power_sum + d) + except<T>(equal<T>(k, T(0)), g * log));
            }
        for (int64_t d = 0; d < padded; d++) scratch.sums[d] += double(power_sum[d]);
    }
};

// ---- all heads, by all threads ----

// One call: phases over (head, chunk) pairs, in one parallel region. With many heads, a thread takes a whole head through all
// phases, so that its keys stay in its cache; with few, all threads share every phase. The same sums are added in the same order
// either way.
template <class T> class Call {
  public:
    Call(const Problem& problem, bool is_backward)
        : problem(problem), s(problem), is_backward(is_backward), num_heads(s.batch * s.heads), key_chunks(s.num_chunks(s.keys)),
          query_chunks(s.num_chunks(s.queries)) {
        const bool small = num_heads * (s.queries + s.keys) * s.width < (1 << 15);
        threads = small ? 1 : std::max<int64_t>(1, std::min<int64_t>(problem.threads, num_heads * std::max(key_chunks, query_chunks)));
        by_head = num_heads >= 4 * threads;
        slots = by_head ? threads : num_heads;
        partials = by_head ? 1 : std::max(key_chunks, is_backward ? query_chunks : 0);
    }

    void run() {
        const int64_t size = s.storage == FLOAT64 ? 8 : s.storage == FLOAT32 ? 4 : 2, row = num_heads * s.width * size;
        for (const View* view : {&problem.out, &problem.grad_q}) prefer_large_pages(view->data, row * s.queries);
        for (const View* view : {&problem.grad_k, &problem.grad_v}) prefer_large_pages(view->data, row * s.keys);
        Arena shared(Arena::OWN, shared_bytes(), problem.poison);
        place(shared);
        bool failed = false;
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
        {
            std::optional<Arena> own;
            try {
                own.emplace(Arena::KEPT, Powers<T>::bytes(s) + Scratch<T>::bytes(s, longest_chunk()), problem.poison);
            } catch (const std::bad_alloc&) {
#pragma omp atomic write
                failed = true;
            }
#pragma omp barrier
            if (!failed) {
                Powers<T> powers(*own, s);
                Scratch<T> scratch(*own, s, longest_chunk());
                if (by_head) whole_heads(powers, scratch);
                else shared_phases(powers, scratch);
            }
        }
        if (failed) throw std::bad_alloc();
        if (is_backward) add_sums();
    }

  private:
    const Problem& problem;
    const Sizes<T> s;
    const bool is_backward;
    const int64_t num_heads, key_chunks, query_chunks;
    int64_t threads, slots, partials;
    bool by_head;
    T* peaks;            // (slots, chunks of keys, 2 padded)
    Memory<T>* partial;  // (slots, partials)
    Memory<T>* memory;   // (slots,)
    Tables<T>*tables, *gradients;  // (slots,)
    double *query_sums, *key_sums;  // (heads, chunks, 2 padded)

    int64_t longest_chunk() const { return s.chunk(s.keys); }
    size_t shared_bytes() const {
        const int64_t all = slots * (key_chunks * 2 * s.padded * sizeof(T) + 64) +
                            slots * (partials + 1) * (Memory<T>::bytes(s) + sizeof(Memory<T>)) +
                            2 * slots * (Tables<T>::bytes(s) + sizeof(Tables<T>)) +
                            (is_backward ? num_heads * (key_chunks + query_chunks) * 2 * s.padded * sizeof(double) : 0);
        return all + 8 * 64 + 4096;
    }
    void place(Arena& arena) {
        peaks = arena.take<T>(slots * key_chunks * 2 * s.padded);
        partial = arena.take<Memory<T>>(slots * partials);
        memory = arena.take<Memory<T>>(slots);
        tables = arena.take<Tables<T>>(slots);
        gradients = arena.take<Tables<T>>(slots);
        for (int64_t i = 0; i < slots * partials; i++) new (partial + i) Memory<T>(arena, s);
        for (int64_t i = 0; i < slots; i++) {
            new (memory + i) Memory<T>(arena, s);
            new (tables + i) Tables<T>(arena, s);
            if (is_backward) new (gradients + i) Tables<T>(arena, s);
        }
        if (is_backward) {
            query_sums = arena.take<double>(num_heads * query_chunks * 2 * s.padded);
            key_sums = arena.take<double>(num_heads * key_chunks * 2 * s.padded);
        }
    }

    Head<T> head_of(int64_t head, Powers<T>& powers) const {
        powers.fill(problem, s, head % s.heads);
        return Head<T>{problem, s, powers, head / s.heads, head % s.heads};
    }
    double log2_added(const Head<T>& head) const { return problem.eps > 0 ? std::log2(problem.eps * double(head.num_keys())) : 0.0; }
    T* peaks_of(int64_t slot, int64_t chunk) const { return peaks + (slot * key_chunks + chunk) * 2 * s.padded; }

    // Combine the chunks' peaks, and derive the tables that depend on them.
    void join_peaks(const Head<T>& head, int64_t slot) const {
        T* peak = memory[slot].peak;
        std::fill_n(peak, 2 * s.padded, T(0));
        for (int64_t chunk = 0; problem.shifted && chunk < key_chunks; chunk++)
            for (int64_t i = 0; i < 2 * s.padded; i++) {
                const T x = peaks_of(slot, chunk)[i];
                peak[i] = x > peak[i] || x != x ? x : peak[i];
            }
        tables[slot].set_peaks(peak, head.powers, s, problem.shifted);
    }
    void finish_tables(int64_t slot) const {
        tables[slot].set_rows(memory[slot].state, s);
        tables[slot].set_totals(memory[slot].total, s);
        if (is_backward) tables[slot].transpose(s);
    }
    void finish_gradients(int64_t slot) const {
        gradients[slot].set_rows(memory[slot].state, s);
        gradients[slot].set_totals(memory[slot].total, s);
        gradients[slot].transpose(s);
    }
    void keep_sums(const Scratch<T>& scratch, double* sums, int64_t index) const {
        std::copy_n(scratch.sums, 2 * s.padded, sums + index * 2 * s.padded);
    }

    void whole_heads(Powers<T>& powers, Scratch<T>& scratch) const {
#pragma omp for schedule(dynamic, 1)
        for (int64_t index = 0; index < num_heads; index++) {
            const Head<T> head = head_of(index, powers);
            const int64_t slot = thread_number();
            for (int64_t c = 0; problem.shifted && c < key_chunks; c++) head.find_peaks(c, scratch, peaks_of(slot, c));
            join_peaks(head, slot);
            memory[slot].clear(s);
            for (int64_t c = 0; c < key_chunks; c++) {
                head.summarise(c, scratch, tables[slot], partial[slot]);
                memory[slot].add(partial[slot], s);
            }
            finish_tables(slot);
            if (!is_backward) {
                const double added = log2_added(head);
                for (int64_t c = 0; c < query_chunks; c++) head.attend(c, scratch, tables[slot], added);
                continue;
            }
            memory[slot].clear(s);
            for (int64_t c = 0; c < query_chunks; c++) {
                head.attend_backward(c, scratch, tables[slot], partial[slot]);
                keep_sums(scratch, query_sums, index * query_chunks + c);
                memory[slot].add(partial[slot], s);
            }
            finish_gradients(slot);
            for (int64_t c = 0; c < key_chunks; c++) {
                head.keys_backward(c, scratch, tables[slot], gradients[slot]);
                keep_sums(scratch, key_sums, index * key_chunks + c);
            }
        }
    }

    void shared_phases(Powers<T>& powers, Scratch<T>& scratch) const {
        if (problem.shifted) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < num_heads * key_chunks; i++)
                head_of(i / key_chunks, powers).find_peaks(i % key_chunks, scratch, peaks + i * 2 * s.padded);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_heads; i++) join_peaks(head_of(i, powers), i);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_heads * key_chunks; i++) {
            const int64_t index = i / key_chunks, chunk = i % key_chunks;
            head_of(index, powers).summarise(chunk, scratch, tables[index], partial[index * partials + chunk]);
        }
        join_partials(key_chunks, false);
        if (!is_backward) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < num_heads * query_chunks; i++) {
                const Head<T> head = head_of(i / query_chunks, powers);
                head.attend(i % query_chunks, scratch, tables[i / query_chunks], log2_added(head));
            }
            return;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_heads * query_chunks; i++) {
            const int64_t index = i / query_chunks, chunk = i % query_chunks;
            head_of(index, powers).attend_backward(chunk, scratch, tables[index], partial[index * partials + chunk]);
            keep_sums(scratch, query_sums, i);
        }
        join_partials(query_chunks, true);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_heads * key_chunks; i++) {
            const int64_t index = i / key_chunks;
            head_of(index, powers).keys_backward(i % key_chunks, scratch, tables[index], gradients[index]);
            keep_sums(scratch, key_sums, i);
        }
    }
    void join_partials(int64_t chunks, bool are_gradients) const {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_heads; i++) {
            memory[i].clear(s);
            for (int64_t c = 0; c < chunks; c++) memory[i].add(partial[i * partials + c], s);
            if (are_gradients) finish_gradients(i);
            else finish_tables(i);
        }
    }

    // The gradients of power and of log(scale): sums over samples and chunks, in order.
    void add_sums() const {
        constexpr double ln2 = 0.6931471805599453094;
        for (int64_t head = 0; head < s.heads; head++)
            for (int64_t d = 0; d < s.width; d++) {
                double change = 0, all = 0;
                for (int64_t b = 0; b < s.batch; b++) {
                    const int64_t index = b * s.heads + head;
                    for (int64_t c = 0; c < query_chunks; c++) {
                        const double* sums = query_sums + (index * query_chunks + c) * 2 * s.padded;
                        change += sums[d];
                        all += sums[s.padded + d];
                    }
                    for (int64_t c = 0; c < key_chunks; c++) change += key_sums[(index * key_chunks + c) * 2 * s.padded + d];
                }
                problem.grad_power[head * s.width + d] = ln2 * change;
                if (problem.grad_scale) problem.grad_scale[head * s.width + d] = -2 * problem.power[head * s.width + d] * all;
            }
    }
};

int run(const Problem* problem, bool is_backward) {
    try {
        if (problem->storage == FLOAT64) Call<double>(*problem, is_backward).run();
        else Call<float>(*problem, is_backward).run();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // namespace

extern "C" {
int polarity_attention(const Problem* problem) { return run(problem, false); }
int polarity_attention_backward(const Problem* problem) { return run(problem, true); }
}
