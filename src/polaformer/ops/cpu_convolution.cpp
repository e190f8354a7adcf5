// The tail of the attention layer on a CPU, forward and backward, behind a plain C interface (see convolution.py):
//
//     out = (attended + depthwise(values)) * gate
//
// on tokens as they lie, (batch, prefix + height width, channels), in one pass: no images, no copies, nothing in between. The
// first `prefix` tokens are not convolved. A task takes some rows of the grid and a group of channels: their values are copied
// once, with a border of zeros, to where they stay in the cache, and every product reads them there.
//
// Results do not depend on the number of threads: tasks are cut by the sizes alone, and their sums are added in order.

#include "cpu_vectors.h"

namespace {

constexpr int64_t TILE = 6;                 // neighbouring tokens that are summed together
constexpr int64_t AHEAD = 12;               // tokens that are asked for before they are needed
constexpr int64_t ROOM_BYTES = 256 * 1024;  // for the rows of a task

struct Tokens {  // (batch, tokens, channels), strides in elements, that of the channels is 1
    void* data;
    int64_t batch, token;
};

struct Convolution {  // the same fields in the same order as in convolution.py
    int64_t batch, height, width, prefix, channels, head_width, kernel_height, kernel_width, storage, threads, poison;
    const void *weight, *bias;  // (head width, kernel height, kernel width), (head width,) or null
    Tokens attended, values, gate, out, grad, grad_attended, grad_values, grad_gate;  // no gate: null
    double* grad_weight;  // (head width, kernel height · kernel width + 1): the last is that of the bias
};

template <class T> struct Group {  // of channels: two registers
    R<T> a, b;
};
template <class T> constexpr int64_t GROUP = 2 * per<T>;
template <class T> INLINE Group<T> take(const T* from) { return {load_r(from), load_r(from + per<T>)}; }
template <class T> INLINE void put(T* to, Group<T> x) { store_r<T>(to, x.a), store_r<T>(to + per<T>, x.b); }

template <class T> class Task {
  public:
    Task(const Convolution& c, int64_t strip_rows, Arena& arena)
        : c(c), strip_rows(strip_rows), taps(c.kernel_height * c.kernel_width), row_step((c.width + c.kernel_width - 1 + TILE) * GROUP<T>),
          values(arena.take<T>(room(c, strip_rows))), slopes(arena.take<T>(room(c, strip_rows))),
          weights(arena.take<T>(taps * GROUP<T>)), flipped(arena.take<T>(taps * GROUP<T>)), bias(arena.take<T>(GROUP<T>)) {
        // The tile at the end of a row reads beyond it; what it finds is not used, but should be numbers.
        std::fill_n(values, room(c, strip_rows), T(0));
        std::fill_n(slopes, room(c, strip_rows), T(0));
    }
    static int64_t room(const Convolution& c, int64_t strip_rows) {
        return (strip_rows + c.kernel_height - 1) * (c.width + c.kernel_width - 1 + TILE) * GROUP<T>;
    }
    static int64_t bytes(const Convolution& c, int64_t strip_rows) {
        const int64_t taps = c.kernel_height * c.kernel_width;
        return (2 * room(c, strip_rows) + (2 * taps + 1) * GROUP<T>) * sizeof(T) + 6 * 64;
    }

    void start(int64_t which_sample, int64_t which_strip, int64_t which_group) {
        sample = which_sample;
        first = which_strip * strip_rows;
        last = std::min(c.height, first + strip_rows);
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
        for (int64_t y = first; y < last; y++)
            convolve(values, weights, y, [&](int64_t cell, Group<T> sum) { finish(cell + c.prefix, sum); });
        for (int64_t token = 0; first == 0 && token < c.prefix; token++) finish(token, Group<T>{});
    }

    // sums (taps + 1, group): of the weights and of the bias, for this task.
    void backward(T* sums) {
        fill(values, [&](int64_t cell) { return read(c.values, cell); });
        fill(slopes, [&](int64_t cell) { return slope(cell + c.prefix); });
        std::fill_n(sums, (taps + 1) * GROUP<T>, T(0));
        for (int64_t y = first; y < last; y++) {
            if (c.gate.data)
                convolve(values, weights, y, [&](int64_t cell, Group<T> sum) { gate_backward(cell + c.prefix, sum); });
            convolve(slopes, flipped, y, [&](int64_t cell, Group<T> sum) { write(c.grad_values, cell, sum); });
            weights_backward(y, sums);
        }
        for (int64_t token = 0; c.gate.data && first == 0 && token < c.prefix; token++) gate_backward(token, Group<T>{});
    }

  private:
    const Convolution& c;
    const int64_t strip_rows, taps, row_step;
    T *values, *slopes;  // (rows of the strip and around it, width and around it, group)
    T *weights, *flipped, *bias;
    int64_t sample, first, last, channel, count;
    bool direct;  // channels are used where they lie

    Group<T> read(const Tokens& tokens, int64_t token) const {
        const int64_t at = sample * tokens.batch + token * tokens.token + channel;
        // Tokens lie far apart, and a group is a cache line of each: the processor does not guess what comes next.
        if (direct) __builtin_prefetch(static_cast<const T*>(tokens.data) + at + AHEAD * tokens.token);
        if (direct) return take(static_cast<const T*>(tokens.data) + at);
        T room[GROUP<T>] = {};
        widen(tokens.data, at, c.storage, count, room);
        return take(room);
    }
    void write(const Tokens& tokens, int64_t token, Group<T> x) const {
        const int64_t at = sample * tokens.batch + token * tokens.token + channel;
        if (direct) return put(static_cast<T*>(tokens.data) + at, x);
        T room[GROUP<T>];
        put(room, x);
        narrow(room, count, tokens.data, at, c.storage);
    }

    // The rows first - border … last + border of the grid, zeros around them.
    template <class Read> void fill(T* rows, Read read_cell) const {
        const int64_t above = c.kernel_height / 2, left = c.kernel_width / 2;
        for (int64_t y = first - above; y < last + above; y++) {
            T* row = rows + (y - first + above) * row_step;
            if (y < 0 || y >= c.height) {
                std::fill_n(row, (c.width + 2 * left) * GROUP<T>, T(0));
                continue;
            }
            std::fill_n(row, left * GROUP<T>, T(0));
            for (int64_t x = 0; x < c.width; x++) put(row + (left + x) * GROUP<T>, read_cell(y * c.width + x));
            std::fill_n(row + (left + c.width) * GROUP<T>, left * GROUP<T>, T(0));
        }
    }

    // Gives the convolution of a row of the grid to `use`, cell by cell.
    template <class Use> void convolve(const T* rows, const T* weight, int64_t y, Use use) const {
        const T* top = rows + (y - first) * row_step;
        const int64_t height = c.kernel_height, width = c.kernel_width, step = row_step;
        for (int64_t x = 0; x < c.width; x += TILE) {
            R<T> a[TILE] = {}, b[TILE] = {};
            const T* factor = weight;
            for (int64_t i = 0; i < height; i++) {
                const T* from = top + i * step + x * GROUP<T>;
#pragma GCC unroll 1  // more of them would not find registers
                for (int64_t j = 0; j < width; j++, from += GROUP<T>, factor += GROUP<T>) {
                    const Group<T> w = take(factor);
                    for (int64_t t = 0; t < TILE; t++) {
                        a[t] += w.a * load_r(from + t * GROUP<T>);
                        b[t] += w.b * load_r(from + t * GROUP<T> + per<T>);
                    }
                }
            }
            T sums[TILE * GROUP<T>];
            for (int64_t t = 0; t < TILE; t++) put(sums + t * GROUP<T>, Group<T>{a[t], b[t]});
            for (int64_t t = 0; t < std::min(TILE, c.width - x); t++) use(y * c.width + x + t, take(sums + t * GROUP<T>));
        }
    }

    Group<T> with_attended(int64_t token, Group<T> sum) const {
        const Group<T> other = read(c.attended, token);
        const Group<T> constant = token < c.prefix ? Group<T>{} : take(bias);
        return {other.a + sum.a + constant.a, other.b + sum.b + constant.b};
    }
    void finish(int64_t token, Group<T> sum) const {
        Group<T> x = with_attended(token, sum);
        if (c.gate.data) {
            const Group<T> gate = read(c.gate, token);
            x = {x.a * gate.a, x.b * gate.b};
        }
        write(c.out, token, x);
    }
    // What reaches the sum before the gate.
    Group<T> slope(int64_t token) const {
        const Group<T> grad = read(c.grad, token);
        if (!c.gate.data) return grad;
        const Group<T> gate = read(c.gate, token);
        return {grad.a * gate.a, grad.b * gate.b};
    }
    void gate_backward(int64_t token, Group<T> sum) const {
        const Group<T> grad = read(c.grad, token), x = with_attended(token, sum);
        write(c.grad_gate, token, {grad.a * x.a, grad.b * x.b});
        write(c.grad_attended, token, slope(token));
    }

    // Five neighbouring taps at a time share what they read.
    void weights_backward(int64_t y, T* sums) const {
        for (int64_t i = 0; i < c.kernel_height; i++) {
            int64_t j = 0;
            for (; j + 5 <= c.kernel_width; j += 5) add_taps<5>(y, i, j, sums);
            for (; j < c.kernel_width; j++) add_taps<1>(y, i, j, sums);
        }
        const T* own = slopes + (y - first + c.kernel_height / 2) * row_step + c.kernel_width / 2 * GROUP<T>;
        Group<T> total = take(sums + taps * GROUP<T>);
        for (int64_t x = 0; x < c.width; x++) {
            const Group<T> s = take(own + x * GROUP<T>);
            total = {total.a + s.a, total.b + s.b};
        }
        put(sums + taps * GROUP<T>, total);
    }
    template <int TAPS> void add_taps(int64_t y, int64_t i, int64_t j, T* sums) const {
        const T* own = slopes + (y - first + c.kernel_height / 2) * row_step + c.kernel_width / 2 * GROUP<T>;
        const T* from = values + (y - first + i) * row_step + j * GROUP<T>;
        T* to = sums + (i * c.kernel_width + j) * GROUP<T>;
        R<T> a[TAPS], b[TAPS];
        for (int tap = 0; tap < TAPS; tap++) a[tap] = load_r(to + tap * GROUP<T>), b[tap] = load_r(to + tap * GROUP<T> + per<T>);
        for (int64_t x = 0; x < c.width; x++) {
            const Group<T> s = take(own + x * GROUP<T>);
            for (int tap = 0; tap < TAPS; tap++) {
                a[tap] += s.a * load_r(from + (x + tap) * GROUP<T>);
                b[tap] += s.b * load_r(from + (x + tap) * GROUP<T> + per<T>);
            }
        }
        for (int tap = 0; tap < TAPS; tap++) put(to + tap * GROUP<T>, {a[tap], b[tap]});
    }
};

template <class T> void run_all(const Convolution& c, bool is_backward) {
    const int64_t row_bytes = (c.width + c.kernel_width - 1 + TILE) * GROUP<T> * int64_t(sizeof(T));
    const int64_t strip_rows = std::clamp<int64_t>(ROOM_BYTES / row_bytes - c.kernel_height + 1, std::min<int64_t>(4, c.height), c.height);
    const int64_t strips = (c.height + strip_rows - 1) / strip_rows, groups = (c.channels + GROUP<T> - 1) / GROUP<T>;
    const int64_t tasks = c.batch * strips * groups, taps = c.kernel_height * c.kernel_width;
    const bool small = c.batch * c.height * c.width * c.channels < (1 << 14);
    const int64_t threads = small ? 1 : std::max<int64_t>(1, std::min(c.threads, tasks));
    Arena sums_room(Arena::OWN, is_backward ? tasks * (taps + 1) * GROUP<T> * sizeof(T) + 64 : 64, c.poison);
    T* sums = sums_room.take<T>(is_backward ? tasks * (taps + 1) * GROUP<T> : 1);
    bool failed = false;
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
    {
        std::optional<Arena> own;
        try {
            own.emplace(Arena::KEPT, Task<T>::bytes(c, strip_rows), c.poison);
        } catch (const std::bad_alloc&) {
#pragma omp atomic write
            failed = true;
        }
#pragma omp barrier
        if (!failed) {
            Task<T> task(c, strip_rows, *own);
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < tasks; i++) {  // groups of channels one after the other: they share cache lines
                task.start(i / (strips * groups), i / groups % strips, i % groups);
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
