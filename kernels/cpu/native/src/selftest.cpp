// Every operation on odd shapes, in exactly as much memory as its contract names: for runs under sanitizers.
// Results are compared with plain loops. Prints what differs; the exit status is the number of differences.
#include "kernels.cpp"

#include <cmath>
#include <cstdio>
#include <random>

namespace {

std::mt19937 random_bits(7);
int wrong = 0;

float uniform() {
    return (float)(random_bits() % 2001) / 1000.0f - 1.0f;
}

// Of exactly `size` elements on the heap, so that a step beyond them is seen.
template <class T>
std::unique_ptr<T[]> filled(size_t size) {
    std::unique_ptr<T[]> values(new T[size ? size : 1]);
    for (size_t i = 0; i < size; i++) {
        if constexpr (sizeof(T) == 2)
            values[i].bits = (uint16_t)(__builtin_bit_cast(uint32_t, uniform()) >> 16);
        else
            values[i] = uniform();
    }
    return values;
}

void expect(double found, double wanted, double tolerance, const char* what, long a, long b, long c) {
    if (found == wanted || std::fabs(found - wanted) <= tolerance) return;
    std::printf("%s of %ld, %ld, %ld: %g, not %g\n", what, a, b, c, found, wanted);
    wrong++;
}

template <class T>
constexpr int64_t dtype_of = sizeof(T) == 2 ? kBFloat16 : kFloat32;
template <class T>
constexpr double tolerance_of = sizeof(T) == 2 ? 0.05 : 1e-3;

void run_one(Op op, const void* record, const Batch& batch) {
    const Instruction instruction{op, record};
    if (ropeway_run(&instruction, 1, &batch)) wrong++;
}

Batch rows_only(int64_t rows) {
    Batch batch{};
    batch.rows = rows;
    return batch;
}

// Adapters of three slots in a layer of two parts: the second slot leaves the layer as it is. Rows use the slots and the
// base model in turns, where there are many in runs. All packed matrices are exactly as large as they have to be.
template <class T>
struct Adapted {
    static constexpr int64_t slots = 3, parts = 2;
    int64_t rows, in, widths[parts], ranks[slots];
    std::unique_ptr<T[]> a[slots][parts], b[slots][parts], packed_a[slots], packed_b[slots], low;
    std::vector<int64_t> order, tile_slots, firsts, of_row, active;
    LoraSlot table[slots];
    Lora record;

    Adapted(const T* x, int64_t rows, int64_t in, int64_t first_width, int64_t second_width, bool gated, int64_t rank)
        : rows(rows), in(in), widths{first_width, second_width}, ranks{rank, 0, rank + 1} {
        const LoraSite site{in, parts, widths, gated};
        const int64_t stride = low_panels(site, rank + 1) * L;
        low.reset(new T[rows * stride + 1]);
        std::memset((void*)low.get(), 0xff, rows * stride * sizeof(T));  // NaN wherever nothing is written
        record = {site, x, table, low.get(), in, stride, dtype_of<T>};
        for (int64_t slot = 0; slot < slots; slot++) fill(site, slot);
        for (int64_t r = 0; r < rows; r++) of_row.push_back(r / (rows > MR ? 5 : 1) % (slots + 1) - 1);
        for (int64_t slot = 0; slot < slots; slot++) {
            int64_t taken = 0;
            for (int64_t r = 0; r < rows; r++) {
                if (of_row[r] != slot) continue;
                if (taken++ % kLoraRows == 0) tile_slots.push_back(slot), firsts.push_back((int64_t)order.size());
                order.push_back(r);
            }
            if (taken) active.push_back(slot);
        }
        firsts.push_back((int64_t)order.size());
    }

    void fill(const LoraSite& site, int64_t slot) {
        const int64_t rank = ranks[slot], own[parts] = {rank, std::max<int64_t>(rank - 1, 0)};
        const int64_t sizes[2] = {ropeway_lora_elements(&site, rank, 0), ropeway_lora_elements(&site, rank, 1)};
        packed_a[slot].reset(new T[sizes[0] + 1]()), packed_b[slot].reset(new T[sizes[1] + 1]());
        for (int64_t part = 0; part < parts && rank; part++) {
            a[slot][part] = filled<T>(rank * in), b[slot][part] = filled<T>(widths[part] * rank);
            ropeway_pack_lora(&site, part, a[slot][part].get(), b[slot][part].get(), own[part], rank, dtype_of<T>,
                              packed_a[slot].get(), packed_b[slot].get());
        }
        table[slot] = {packed_a[slot].get(), packed_b[slot].get(), rank};
    }

    void describe(Batch& batch) const {
        batch.lora_tiles = (int64_t)tile_slots.size(), batch.lora_groups = (int64_t)active.size();
        batch.lora_slots = tile_slots.data(), batch.lora_firsts = firsts.data(), batch.lora_rows = order.data();
        batch.lora_of_row = of_row.data(), batch.lora_active = active.data();
    }

    // What is added to a column of the layer's output.
    double delta(const T* x, int64_t row, int64_t column) const {
        const int64_t slot = of_row[row], part = column >= widths[0], place = column - part * widths[0];
        if (slot < 0) return 0;
        const int64_t rank = std::max<int64_t>(ranks[slot] - part, 0);
        double sum = 0;
        for (int64_t k = 0; k < rank; k++) {
            double low = 0;
            for (int64_t i = 0; i < in; i++) low += (double)widen(x[row * in + i]) * widen(a[slot][part][k * in + i]);
            sum += low * widen(b[slot][part][place * rank + k]);
        }
        return sum;
    }
};

// What a few weights of each many blocks are, so that these have upper bytes which are rare.
template <class T>
void make_rare(T* weight, int64_t count) {
    if constexpr (sizeof(T) == 2)
        for (int64_t i = 77; i < count; i += 128 * kPoolShare) weight[i].bits = (uint16_t)(0x0100 + i % 0x3000);
}

// `rank`: of adapters; 0 for none.
template <class T>
void check_linear(int64_t rows, int64_t in, int64_t out, Epilogue epilogue, int64_t rank) {
    const int64_t columns = epilogue == kGated ? 2 * out : out;
    auto x = filled<T>(rows * in);
    auto weight = filled<T>(columns * in);
    make_rare(weight.get(), columns * in);
    const int64_t bytes = ropeway_packed_bytes(columns, in, dtype_of<T>, epilogue == kGated);
    const int64_t less = ropeway_compact_bytes(columns, in, dtype_of<T>, epilogue == kGated);
    std::unique_ptr<char[]> packed(new char[bytes]), compact(new char[less]);
    ropeway_pack(weight.get(), columns, in, dtype_of<T>, epilogue == kGated, packed.get());
    if (less && !ropeway_compact(packed.get(), columns, in, epilogue == kGated, compact.get())) wrong++;
    if (less && !ropeway_compact_fits(compact.get(), columns, in, epilogue == kGated)) wrong++;
    const int64_t width = epilogue == kLogits ? (out + kPeak - 1) / kPeak * kPeak : out;
    std::unique_ptr<T[]> narrow(new T[rows * width + 1]);
    std::unique_ptr<float[]> wide(new float[rows * width]), peaks(new float[rows * width / kPeak + 1]);
    void* target = epilogue == kLogits ? (void*)wide.get() : (void*)narrow.get();
    const int64_t first = epilogue == kGated ? out : columns / 3;
    const Adapted<T> adapted(x.get(), rows, in, first, columns - first, epilogue == kGated, rank);
    const Linear record{x.get(), less ? compact.get() : packed.get(), nullptr, rank ? &adapted.record : nullptr, target,
                        peaks.get(), in, width, width / kPeak, in, out, dtype_of<T>, epilogue, less};
    Batch batch = rows_only(rows);
    if (rank) adapted.describe(batch), run_one(kLora, &adapted.record, batch);
    run_one(kLinear, &record, batch);
    auto product = [&](int64_t r, int64_t c) {
        double sum = rank ? adapted.delta(x.get(), r, c) : 0;
        for (int64_t i = 0; i < in; i++) sum += (double)widen(x[r * in + i]) * widen(weight[c * in + i]);
        return sum;
    };
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < out; c++) {
            double wanted = product(r, c);
            const double scale = 1 + std::fabs(wanted) + (rank ? std::sqrt((double)(rank * in)) : 0);
            if (epilogue == kGated) wanted = wanted / (1 + std::exp(-wanted)) * product(r, out + c);
            const double found = epilogue == kLogits ? wide[r * width + c] : widen(narrow[r * width + c]);
            const double most = epilogue == kGated ? scale * (1 + std::fabs(product(r, out + c))) : scale;
            expect(found, wanted, tolerance_of<T> * (most + std::fabs(wanted)), "linear", rows, in, out);
        }
}

#if ROPEWAY_SCREEN
// Against the first greatest of the same kernel's logits, whose bits they have to be. Some columns are there twice.
template <class T>
void check_screen(int64_t rows, int64_t in, int64_t out) {
    const int64_t width = (out + kPeak - 1) / kPeak * kPeak;
    auto x = filled<T>(rows * in), weight = filled<T>(out * in);
    for (int64_t r = 1; r < rows; r += 2)
        for (int64_t i = 0; i < in; i++) x[r * in + i] = x[(r - 1) * in + (i * 7 + 1) % in];
    for (int64_t i = 0; i < in; i++) weight[(out - 1) * in + i] = weight[out / 2 * in + i];
    make_rare(weight.get(), (out - 1) * in);
    const int64_t zero = 3, strange = 4;  // rows that are left, as any others of zeros
    if (rows > zero) std::fill_n(x.get() + zero * in, in, T{});
    if constexpr (sizeof(T) == 2) {
        if (rows > strange) x[strange * in].bits = 0x7fc0;
    } else {
        if (rows > strange) x[strange * in] = NAN;
    }
    const int64_t less = ropeway_compact_bytes(out, in, dtype_of<T>, 0);
    std::unique_ptr<char[]> plain(new char[ropeway_packed_bytes(out, in, dtype_of<T>, 0)]), compact(new char[less]);
    ropeway_pack(weight.get(), out, in, dtype_of<T>, 0, plain.get());
    if (less && !ropeway_compact(plain.get(), out, in, 0, compact.get())) wrong++;
    const char* packed = less ? compact.get() : plain.get();
    std::unique_ptr<float[]> logits(new float[rows * width]), peaks(new float[rows * width / kPeak + 1]);
    const Linear linear{x.get(), packed,        nullptr, nullptr, logits.get(), peaks.get(), in,
                        width,   width / kPeak, in,      out,     dtype_of<T>,  kLogits,     less};
    run_one(kLinear, &linear, rows_only(rows));
    int64_t bytes, floats;
    ropeway_screen_sizes(out, in, &bytes, &floats);
    std::unique_ptr<uint8_t[]> coarse(new uint8_t[bytes]);
    std::unique_ptr<float[]> bounds(new float[floats]);
    if (!ropeway_screen_pack(packed, out, in, dtype_of<T>, less, coarse.get(), bounds.get())) wrong++;
    std::unique_ptr<int64_t[]> found(new int64_t[rows + 1]);
    const Screen record{x.get(), packed, coarse.get(), bounds.get(), found.get(), in, in, out, dtype_of<T>, less};
    const Instruction stages[] = {{kScreenRows, &record}, {kScreenColumns, &record}, {kScreenPick, &record}};
    const Batch batch = rows_only(rows);
    if (ropeway_run(stages, 3, &batch)) wrong++;
    for (int64_t r = 0; r < rows; r++) {
        const float* row = logits.get() + r * width;
        const bool zeros = std::all_of(x.get() + r * in, x.get() + (r + 1) * in, [](T v) { return widen(v) == 0; });
        const int64_t wanted = zeros || r == strange ? -1 : std::max_element(row, row + out) - row;
        if (found[r] != -1 || out < 200) expect((double)found[r], (double)wanted, 0, "screen", rows, in, out);
    }
}
#endif

template <class T>
void check_embed_delta(int64_t rows, int64_t vocab, int64_t width, int64_t rank) {
    const int64_t widths[1] = {width};
    const LoraSite site{vocab, 1, widths, 0};
    auto a = filled<T>(vocab * even(rank)), b = filled<T>(width * rank), none = filled<T>(0);
    std::unique_ptr<float[]> out(new float[rows * width]);
    std::fill(out.get(), out.get() + rows * width, NAN);
    std::unique_ptr<T[]> packed(new T[ropeway_lora_elements(&site, rank, 1)]());
    const LoraSite without{0, 1, widths, 0};
    ropeway_pack_lora(&without, 0, none.get(), b.get(), rank, rank, dtype_of<T>, none.get(), packed.get());
    const LoraSlot slots[2] = {{nullptr, nullptr, 0}, {a.get(), packed.get(), rank}};
    std::vector<int64_t> ids, of_row;
    for (int64_t r = 0; r < rows; r++) ids.push_back((r * 7) % vocab), of_row.push_back(r % 3 - 1);
    const EmbedDelta record{ids.data(), slots, out.get(), width, dtype_of<T>};
    Batch batch = rows_only(rows);
    batch.lora_of_row = of_row.data();
    run_one(kEmbedDelta, &record, batch);
    for (int64_t i = 0; i < rows * width; i++) {
        const int64_t row = i / width;
        double wanted = 0;
        for (int64_t k = 0; k < rank && of_row[row] == 1; k++)
            wanted += (double)widen(a[ids[row] * even(rank) + k]) * widen(b[i % width * rank + k]);
        expect(out[i], wanted, of_row[row] == 1 ? 1e-5 * (1 + rank) : 0, "embed_delta", rows, width, rank);
    }
}

template <class T>
void check_rows(int64_t rows, int64_t width) {
    auto x = filled<T>(rows * width), weight = filled<T>(width);
    make_rare(x.get(), rows * width);
    auto residual = filled<float>(rows * width);
    std::unique_ptr<float[]> before(new float[rows * width + 1]);
    std::copy(residual.get(), residual.get() + rows * width, before.get());
    std::unique_ptr<T[]> out(new T[rows * width + 1]);
    const Norm norm{x.get(), residual.get(), weight.get(), out.get(), width, dtype_of<T>, kFloat32, dtype_of<T>, 1e-5};
    run_one(kNorm, &norm, rows_only(rows));
    for (int64_t r = 0; r < rows; r++) {
        double squares = 0;
        for (int64_t i = 0; i < width; i++) squares += std::pow(before[r * width + i] + widen(x[r * width + i]), 2);
        for (int64_t i = 0; i < width; i++) {
            const double sum = before[r * width + i] + widen(x[r * width + i]);
            const double wanted = sum / std::sqrt(squares / (double)width + 1e-5) * widen(weight[i]);
            expect(widen(out[r * width + i]), wanted, tolerance_of<T>, "norm", rows, width, i);
        }
    }
    std::unique_ptr<int64_t[]> ids(new int64_t[rows + 1]);
    for (int64_t r = 0; r < rows; r++) ids[r] = rows - 1 - r;
    std::unique_ptr<float[]> gathered(new float[rows * width + 1]);
    const Gather gather{x.get(), ids.get(), gathered.get(), rows, width, dtype_of<T>, kFloat32, kRows};
    run_one(kGather, &gather, rows_only(rows));
    for (int64_t i = 0; i < rows * width; i++)
        expect(gathered[i], widen(x[(rows - 1 - i / width) * width + i % width]), 0, "gather", rows, width, i);
    const int64_t bytes = ropeway_packed_bytes(rows, width, dtype_of<T>, 0);
    const int64_t less = ropeway_compact_bytes(rows, width, dtype_of<T>, 0);
    std::unique_ptr<char[]> panels(new char[bytes]), compact(new char[less]);
    ropeway_pack(x.get(), rows, width, dtype_of<T>, 0, panels.get());
    if (less && !ropeway_compact(panels.get(), rows, width, 0, compact.get())) wrong++;
    for (const Form form : {kPanels, kCompact}) {
        if (form == kCompact && !less) continue;
        std::fill(gathered.get(), gathered.get() + rows * width, -9.0f);
        const void* table = form == kCompact ? compact.get() : panels.get();
        const Gather unpacked{table, ids.get(), gathered.get(), rows, width, dtype_of<T>, kFloat32, form};
        run_one(kGather, &unpacked, rows_only(rows));
        for (int64_t i = 0; i < rows * width; i++)
            expect(gathered[i], widen(x[(rows - 1 - i / width) * width + i % width]), 0, "panels", rows, width, i);
    }
}

template <class T>
void check_rotary(int64_t rows, int64_t heads, int64_t dim) {
    auto x = filled<T>(rows * heads * dim), cos = filled<T>(rows * dim), sin = filled<T>(rows * dim);
    std::unique_ptr<T[]> before(new T[rows * heads * dim]);
    std::copy(x.get(), x.get() + rows * heads * dim, before.get());
    const Rotary record{x.get(), cos.get(), sin.get(), heads * dim, heads, dim, dtype_of<T>, dtype_of<T>};
    run_one(kRotary, &record, rows_only(rows));
    for (int64_t i = 0; i < rows * heads * dim; i++) {
        const int64_t row = i / (heads * dim), d = i % dim, other = d < dim / 2 ? i + dim / 2 : i - dim / 2;
        const double wanted = (double)widen(before[i]) * widen(cos[row * dim + d]) +
                              (double)widen(before[other]) * widen(sin[row * dim + d]);
        expect(widen(x[i]), wanted, tolerance_of<T>, "rotary", rows, heads, dim);
    }
}

// Sequences of (count, length); writes their keys and values and attends.
// Attention before and behind a product of as many rows, which has its blocks brought near. The results are the same.
void run_between_products(const Attention& attention, const Batch& batch) {
    const int64_t in = 64, out = 640, less = ropeway_compact_bytes(out, in, kBFloat16, 0);
    auto x = filled<bf16>(batch.rows * in), weight = filled<bf16>(out * in);
    std::unique_ptr<char[]> packed(new char[ropeway_packed_bytes(out, in, kBFloat16, 0)]), compact(new char[less]);
    std::unique_ptr<bf16[]> found(new bf16[batch.rows * out + 1]);
    ropeway_pack(weight.get(), out, in, kBFloat16, 0, packed.get());
    if (less && !ropeway_compact(packed.get(), out, in, 0, compact.get())) wrong++;
    const Linear linear{x.get(), less ? compact.get() : packed.get(), nullptr, nullptr, found.get(), nullptr, in, out, 0, in,
                        out,     kBFloat16, kPlain, less};
    const Instruction steps[] = {{kAttention, &attention}, {kLinear, &linear}, {kAttention, &attention}};
    if (ropeway_run(steps, 3, &batch)) wrong++;
}

template <class T>
void check_attention(std::vector<std::pair<int64_t, int64_t>> sequences, int64_t block, int64_t kv_heads, int64_t group,
                     int64_t dim) {
    std::vector<int64_t> counts, lengths, starts, tables, slots;
    int64_t blocks = 0, rows = 0, keys = 0;
    for (auto [count, length] : sequences) blocks += (length + block - 1) / block;
    int64_t next = blocks;
    for (auto [count, length] : sequences) {
        counts.push_back(count), lengths.push_back(length), starts.push_back((int64_t)tables.size());
        for (int64_t i = 0; i < (length + block - 1) / block; i++) tables.push_back(--next);
        for (int64_t p = 0; p < length; p++) slots.push_back(tables[starts.back() + p / block] * block + p % block);
        rows += count, keys += length;
    }
    const int64_t heads = kv_heads * group, width = 2 * kv_heads * dim;
    auto kv = filled<T>(keys * width), query = filled<T>(rows * heads * dim);
    std::unique_ptr<T[]> cache(new T[blocks * block * width]), out(new T[rows * heads * dim]);
    std::memset((void*)cache.get(), 0xff, blocks * block * width * sizeof(T));  // NaN wherever nothing is written
    const WriteKv write{kv.get(), cache.get(), slots.data(), width * (int64_t)sizeof(T), block, kv_heads, dim, dtype_of<T>};
    run_one(kWriteKv, &write, rows_only(keys));
    Batch batch = rows_only(rows);
    batch.sequences = (int64_t)counts.size(), batch.counts = counts.data(), batch.lengths = lengths.data();
    batch.starts = starts.data(), batch.blocks = tables.data();
    const Attention record{query.get(), cache.get(), out.get(), heads * dim, heads * dim, block,
                           heads,       kv_heads,    dim,       dtype_of<T>, 0.5};
    run_between_products(record, batch);
    int64_t row = 0, first = 0;
    for (size_t s = 0; s < counts.size(); first += lengths[s++])
        for (int64_t t = 0; t < counts[s]; t++, row++)
            for (int64_t h = 0; h < heads; h++) {
                const int64_t seen = lengths[s] - counts[s] + t + 1;
                std::vector<double> weights(seen);
                double sum = 0;
                for (int64_t p = 0; p < seen; p++) {
                    double score = 0;
                    for (int64_t d = 0; d < dim; d++)
                        score += (double)widen(query[(row * heads + h) * dim + d]) *
                                 widen(kv[(first + p) * width + h / group * dim + d]);
                    sum += weights[p] = std::exp(score * 0.5);
                }
                for (int64_t d = 0; d < dim; d++) {
                    double wanted = 0;
                    for (int64_t p = 0; p < seen; p++)
                        wanted += weights[p] / sum * widen(kv[(first + p) * width + (kv_heads + h / group) * dim + d]);
                    expect(widen(out[(row * heads + h) * dim + d]), wanted, tolerance_of<T>, "attention", row, h, d);
                }
            }
}

#include "selftest_draw.h"

template <class T>
void check_all() {
    for (int64_t rows : {0, 1, 5, 12, 13, 37})
        for (int64_t in : {1, 2, 31, 64, 100})
            for (int64_t out : {1, 15, 16, 32, 33, 70}) {
                for (int64_t rank : {0, 1, 4}) {
                    check_linear<T>(rows, in, out, kPlain, rank);
                    check_linear<T>(rows, in, out, kGated, rank);
                    check_linear<T>(rows, in, out, kLogits, rank);
                }
            }
    check_linear<T>(250, 18, 40, kPlain, 17);
    check_linear<T>(130, 67, 40, kGated, 33);
    for (int64_t rows : {0, 1, 9})
        for (int64_t rank : {1, 2, 17}) check_embed_delta<T>(rows, 11, 33, rank);
#if ROPEWAY_SCREEN
    for (int64_t rows : {0, 1, 5, 12, 13, 37})
        for (int64_t in : {1, 2, 31, 64, 130})
            for (int64_t out : {1, 15, 32, 33, 70, 700}) check_screen<T>(rows, in, out);
    check_screen<T>(130, 66, 90);
#endif
    for (int64_t rows : {0, 1, 8, 9})
        for (int64_t width : {1, 15, 16, 33, 64}) check_rows<T>(rows, width);
    for (int64_t dim : {2, 6, 32, 34}) {
        check_rotary<T>(3, 2, dim);
        check_attention<T>({{1, 1}}, 4, 1, 1, dim);
        check_attention<T>({{1, 64}, {1, 65}, {1, 63}}, 16, 2, 3, dim);
        check_attention<T>({{5, 5}, {1, 17}, {40, 130}, {1, 4}}, 4, 1, 3, dim);
        check_attention<T>({{3, 33}}, 1, 1, 50, dim);
    }
    for (int64_t dim : {32, 64, 96})
        for (int64_t block : {16, 48}) {
            check_attention<T>({{1, 1}, {1, 2}, {1, 15}, {1, 16}, {1, 17}, {1, 49}, {1, 65}}, block, 2, 3, dim);
            check_attention<T>({{20, 20}, {13, 81}, {1, 128}, {2, 130}}, block, 3, 2, dim);
            check_attention<T>({{2, 97}, {1, 64}}, block, 1, 26, dim);
        }
}

}  // namespace

int main() {
    for (int threads : {1, 3}) {
        ropeway_set_threads(threads, 10);
        check_all<float>();
        check_all<bf16>();
        check_sampling();
    }
    pool.reset();
    return wrong > 100 ? 100 : wrong;
}
