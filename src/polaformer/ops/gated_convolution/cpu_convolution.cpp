// The tail of the attention layer on a CPU, forward and backward, behind a plain C interface (see cpu.py):
//
//     out = (attended + depthwise(values)) * gate
//
// on tokens in place, (batch, prefix + height width, channels), in one pass: no images, no copies, no intermediate results. The
// first `prefix` tokens are not convolved. A task processes some rows of the grid and a group of channels: their values are
// copied once, with a border of zeros, into a buffer that stays in the cache, and every product reads them there. Long rows are
// cut into pieces, so that a task's buffer does not grow with the number of tokens.
//
// Results do not depend on the number of threads: the sizes alone determine the tasks, and their sums are added in order.

#include "vectors.h"

namespace {

constexpr int64_t TILE = 6;                   // neighbouring tokens whose sums are computed together
constexpr int64_t AHEAD = 12;                 // tokens to prefetch ahead
constexpr int64_t BUFFER_BYTES = 256 * 1024;  // for the rows of a task
constexpr int64_t LONGEST_ROW = 256;          // of a piece

struct Tokens {  // (batch, tokens, channels), strides in elements, the last one is 1
    void* data;
    int64_t batch, token;
};

struct Convolution {  // the same fields in the same order as in cpu.py
    int64_t batch, height, width, prefix, channels, head_width, kernel_height, kernel_width, storage, threads, poison;
    const void *weight, *bias;  // (head width, kernel height, kernel width), (head width,) or null
    Tokens attended, values, gate, out, grad, grad_attended, grad_values, grad_gate;  // null without a gate
    double* grad_weight;  // (head width, kernel height · kernel width + 1): the last column is the bias's
};

template <class T> constexpr int64_t GROUP = lanes<T>;  // channels of a task: a pair of registers

// How the grid is cut into pieces of some rows and columns.
template <class T> struct Tiling {
    int64_t columns, rows, across, down;  // columns and rows of a piece; number of pieces in a row and in a column
    explicit Tiling(const Convolution& c) {
        columns = std::min<int64_t>(c.width, LONGEST_ROW);
        const int64_t row_bytes = row_step(c) * int64_t(sizeof(T));
        rows = std::clamp<int64_t>(BUFFER_BYTES / row_bytes - c.kernel_height + 1, std::min<int64_t>(4, c.height), c.height);
        across = (c.width + columns - 1) / columns;
        down = (c.height + rows - 1) / rows;
    }
    int64_t row_step(const Convolution& c) const { return (columns + c.kernel_width - 1 + TILE) * GROUP<T>; }
    int64_t size(const Convolution& c) const { return (rows + c.kernel_height - 1) * row_step(c); }
};

template <class T> class Task {
  public:
    Task(const Convolution& c, const Tiling<T>& tiling, bool is_backward, Arena& arena)
        : c(c), tiling(tiling), taps(c.kernel_height * c.kernel_width), row_step(tiling.row_step(c)),
          values(arena.take<T>(tiling.size(c))), slopes(is_backward ? arena.take<T>(tiling.size(c)) : nullptr),
          weights(arena.take<T>(taps * GROUP<T>)), flipped(arena.take<T>(taps * GROUP<T>)), bias(arena.take<T>(GROUP<T>)) {
        // The tile at the end of a row reads beyond it; the values there are not used, but must be numbers.
        std::fill_n(values, tiling.size(c), T(0));
        if (is_backward) std::fill_n(slopes, tiling.size(c), T(0));
    }
    static int64_t bytes(const Convolution& c, const Tiling<T>& tiling) {
        return (2 * tiling.size(c) + (2 * c.kernel_height * c.kernel_width + 1) * GROUP<T>) * sizeof(T) + 6 * 64;
    }

    void start(int64_t which_sample, int64_t which_piece, int64_t which_group) {
        sample = which_sample;
        top = which_piece / tiling.across * tiling.rows;
        bottom = std::min(c.height, top + tiling.rows);
        left = which_piece % tiling.across * tiling.columns;
        right = std::min(c.width, left + tiling.columns);
        has_prefix = which_piece == 0;
        channel = which_group * GROUP<T>;
        count = std::min(GROUP<T>, c.channels - channel);
        direct = count == GROUP<T> && c.storage == (sizeof(T) == 4 ? FLOAT32 : FLOAT64);
        for (int64_t i = 0; i < GROUP<T>; i++) {
            const int64_t d = (channel + i) % c.head_width;
            for (int64_t tap = 0; tap < taps; tap++) {
                weights[tap * GROUP<T> + i] = static_cast<const T*>(c.weight)[d * taps + tap];
                flipped[(taps - 1 - tap) * GROUP<T> + i] = weights[tap * GROUP<T> + i];
            }
            bias[i] = c.bias ? static_cast<const T*>(c.bias)[d] : T(0);
        }
    }

    void forward() {
        fill(values, [&](int64_t cell) { return read(c.values, cell); });
        for (int64_t y = top; y < bottom; y++)
            convolve(values, weights, y, [&](int64_t cell, V<T> sum) { finish(cell + c.prefix, sum); });
        for (int64_t token = 0; has_prefix && token < c.prefix; token++) finish(token, V<T>{});
    }

    // sums (taps + 1, group): this task's gradients of the weights and of the bias.
    void backward(T* sums) {
        fill(values, [&](int64_t cell) { return read(c.values, cell); });
        fill(slopes, [&](int64_t cell) { return slope(cell + c.prefix); });
        std::fill_n(sums, (taps + 1) * GROUP<T>, T(0));
        for (int64_t y = top; y < bottom; y++) {
            if (c.gate.data)
                convolve(values, weights, y, [&](int64_t cell, V<T> sum) { gate_backward(cell + c.prefix, sum); });
            convolve(slopes, flipped, y, [&](int64_t cell, V<T> sum) { write(c.grad_values, cell, sum); });
            weights_backward(y, sums);
        }
        for (int64_t token = 0; c.gate.data && has_prefix && token < c.prefix; token++) gate_backward(token, V<T>{});
    }

  private:
    const Convolution& c;
    const Tiling<T>& tiling;
    const int64_t taps, row_step;
    T *values, *slopes;  // (rows of the piece and around it, columns of the piece and around it, group)
    T *weights, *flipped, *bias;
    int64_t sample, top, bottom, left, right, channel, count;
    bool has_prefix, direct;  // direct: channels are used in place

    V<T> read(const Tokens& tokens, int64_t token) const {
        const int64_t at = sample * tokens.batch + token * tokens.token + channel;
        // Tokens are far apart in memory and a group is a cache line of each: the processor does not predict the next one.
        if (direct) __builtin_prefetch(static_cast<const T*>(tokens.data) + at + AHEAD * tokens.token);
        if (direct) return load(static_cast<const T*>(tokens.data) + at);
        T buffer[GROUP<T>] = {};
        widen(tokens.data, at, c.storage, count, buffer);
        return load(buffer);
    }
    void write(const Tokens& tokens, int64_t token, V<T> x) const {
        const int64_t at = sample * tokens.batch + token * tokens.token + channel;
        if (direct) return store<T>(static_cast<T*>(tokens.data) + at, x);
        T buffer[GROUP<T>];
        store<T>(buffer, x);
        narrow(buffer, count, tokens.data, at, c.storage);
    }

    // Fill in the piece and its surroundings, zeros beyond the grid.
    template <class Read> void fill(T* rows, Read read_cell) const {
        const int64_t above = c.kernel_height / 2, beside = c.kernel_width / 2;
        const int64_t begin = std::max<int64_t>(0, left - beside), end = std::min(c.width, right + beside);
        for (int64_t y = std::max<int64_t>(0, top - above); y < std::min(c.height, bottom + above); y++) {
            T* row = rows + (y - top + above) * row_step;
            std::fill_n(row, (begin - (left - beside)) * GROUP<T>, T(0));
            for (int64_t x = begin; x < end; x++) store<T>(row + (x - left + beside) * GROUP<T>, read_cell(y * c.width + x));
            std::fill_n(row + (end - left + beside) * GROUP<T>, (right + beside - end) * GROUP<T>, T(0));
        }
    }

    // Pass the convolution of a row of the piece to `use`, cell by cell; rows of the kernel beyond the grid are left out.
    template <class Use> void convolve(const T* rows, const T* weight, int64_t y, Use use) const {
        const int64_t width = c.kernel_width, above = c.kernel_height / 2;
        const int64_t begin = std::max<int64_t>(0, above - y), end = std::min(c.kernel_height, c.height + above - y);
        for (int64_t x = left; x < right; x += TILE) {
            R<T> a[TILE] = {}, b[TILE] = {};
            const T* factor = weight + begin * width * GROUP<T>;
            for (int64_t i = begin; i < end; i++) {
                const T* from = rows + (y - top + i) * row_step + (x - left) * GROUP<T>;
#pragma GCC unroll 1  // unrolled, it would run out of registers
                for (int64_t j = 0; j < width; j++, from += GROUP<T>, factor += GROUP<T>) {
                    const V<T> w = load(factor);
                    for (int64_t t = 0; t < TILE; t++) {
                        a[t] += w.a * load_r(from + t * GROUP<T>);
                        b[t] += w.b * load_r(from + t * GROUP<T> + per<T>);
                    }
                }
            }
            T sums[TILE * GROUP<T>];
            for (int64_t t = 0; t < TILE; t++) store<T>(sums + t * GROUP<T>, V<T>{a[t], b[t]});
            for (int64_t t = 0; t < std::min(TILE, right - x); t++) use(y * c.width + x + t, load(sums + t * GROUP<T>));
        }
    }

    V<T> with_attended(int64_t token, V<T> sum) const {
        const V<T> other = read(c.attended, token);
        const V<T> constant = token < c.prefix ? V<T>{} : load(bias);
        return other + sum + constant;
    }
    void finish(int64_t token, V<T> sum) const {
        V<T> x = with_attended(token, sum);
        if (c.gate.data) {
            x = x * read(c.gate, token);
        }
        write(c.out, token, x);
    }
    // The gradient of the sum before the gate.
    V<T> slope(int64_t token) const {
        const V<T> grad = read(c.grad, token);
        if (!c.gate.data) return grad;
        return grad * read(c.gate, token);
    }
    void gate_backward(int64_t token, V<T> sum) const {
        const V<T> grad = read(c.grad, token), x = with_attended(token, sum);
        write(c.grad_gate, token, grad * x);
        write(c.grad_attended, token, slope(token));
    }

    // Five neighbouring taps at a time share their reads.
    void weights_backward(int64_t y, T* sums) const {
        const int64_t above = c.kernel_height / 2;
        for (int64_t i = std::max<int64_t>(0, above - y); i < std::min(c.kernel_height, c.height + above - y); i++) {
            int64_t j = 0;
            for (; j + 5 <= c.kernel_width; j += 5) add_taps<5>(y, i, j, sums);
            for (; j < c.kernel_width; j++) add_taps<1>(y, i, j, sums);
        }
        V<T> total = load(sums + taps * GROUP<T>);
        for (int64_t x = 0; x < right - left; x++) total += load(own_slopes(y) + x * GROUP<T>);
        store<T>(sums + taps * GROUP<T>, total);
    }
    const T* own_slopes(int64_t y) const {
        return slopes + (y - top + c.kernel_height / 2) * row_step + c.kernel_width / 2 * GROUP<T>;
    }
    template <int TAPS> void add_taps(int64_t y, int64_t i, int64_t j, T* sums) const {
        const T *own = own_slopes(y), *from = values + (y - top + i) * row_step + j * GROUP<T>;
        T* to = sums + (i * c.kernel_width + j) * GROUP<T>;
        V<T> total[TAPS];
        for (int tap = 0; tap < TAPS; tap++) total[tap] = load(to + tap * GROUP<T>);
        for (int64_t x = 0; x < right - left; x++) {
            const V<T> s = load(own + x * GROUP<T>);
            for (int tap = 0; tap < TAPS; tap++) total[tap] += s * load(from + (x + tap) * GROUP<T>);
        }
        for (int tap = 0; tap < TAPS; tap++) store<T>(to + tap * GROUP<T>, total[tap]);
    }
};

template <class T> void run_all(const Convolution& c, bool is_backward) {
    const Tiling<T> tiling(c);
    const int64_t pieces = tiling.across * tiling.down, groups = (c.channels + GROUP<T> - 1) / GROUP<T>;
    const int64_t tasks = c.batch * pieces * groups, taps = c.kernel_height * c.kernel_width;
    const bool small = c.batch * c.height * c.width * c.channels < (1 << 14);
    const int64_t threads = small ? 1 : std::max<int64_t>(1, std::min(c.threads, tasks));
    Arena sums_arena(Arena::OWN, is_backward ? tasks * (taps + 1) * GROUP<T> * sizeof(T) + 64 : 64, c.poison);
    T* sums = sums_arena.take<T>(is_backward ? tasks * (taps + 1) * GROUP<T> : 1);
    const int64_t size = c.storage == FLOAT64 ? 8 : c.storage == FLOAT32 ? 4 : 2;
    for (const Tokens* tokens : {&c.out, &c.grad_attended, &c.grad_values, &c.grad_gate})
        prefer_large_pages(tokens->data, c.batch * c.height * c.width * c.channels * size);
    bool failed = false;
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
    {
        std::optional<Arena> own;
        try {
            own.emplace(Arena::KEPT, Task<T>::bytes(c, tiling), c.poison);
        } catch (const std::bad_alloc&) {
#pragma omp atomic write
            failed = true;
        }
#pragma omp barrier
        if (!failed) {
            Task<T> task(c, tiling, is_backward, *own);
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < tasks; i++) {  // groups of channels in sequence: they share cache lines
                task.start(i / (pieces * groups), i / groups % pieces, i % groups);
                if (is_backward) task.backward(sums + i * (taps + 1) * GROUP<T>);
                else task.forward();
            }
        }
    }
    if (failed) throw std::bad_alloc();
    if (!is_backward) return;
    std::fill_n(c.grad_weight, c.head_width * (taps + 1), 0.0);
    for (int64_t i = 0; i < tasks; i++)
        for (int64_t tap = 0; tap <= taps; tap++)
            for (int64_t g = 0; g < GROUP<T> && i % groups * GROUP<T> + g < c.channels; g++)
                c.grad_weight[(i % groups * GROUP<T> + g) % c.head_width * (taps + 1) + tap] +=
                    double(sums[(i * (taps + 1) + tap) * GROUP<T> + g]);
}

int run(const Convolution* c, bool is_backward) {
    try {
        if (c->storage == FLOAT64) run_all<double>(*c, is_backward);
        else run_all<float>(*c, is_backward);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // namespace

extern "C" {
int gated_convolution(const Convolution* c) { return run(c, false); }
int gated_convolution_backward(const Convolution* c) { return run(c, true); }
}
