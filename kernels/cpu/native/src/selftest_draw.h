// Checks of draws and of what log probabilities are made of; a part of `selftest.cpp`.
#pragma once

// What a draw keeps, and which token it takes, by sorting; logits with ties, -inf and an odd end of the vocabulary.
struct DrawOptions {
    int64_t top_k;
    double top_p, min_p;
    float temperature;
};

void check_draw_row(const float* row, int64_t vocab, const DrawOptions& o, double point, float threshold, int64_t token) {
    std::vector<float> sorted;
    for (int64_t i = 0; i < vocab; i++) sorted.push_back(row[i] / o.temperature);
    std::sort(sorted.begin(), sorted.end(), std::greater<float>());
    const float best = sorted[0];
    float least = best + (float)std::log(o.min_p);
    if (o.top_k > 0 && o.top_k < vocab) least = std::max(least, sorted[o.top_k - 1]);
    double kept = 0, sum = 0;
    for (float x : sorted) kept += x >= least ? std::exp((double)x - best) : 0;
    if (o.top_p < 1)
        for (float x : sorted)
            if ((sum += std::exp((double)x - best)) >= o.top_p * kept) {
                least = x;
                break;
            }
    expect(threshold, least, 0, "threshold", vocab, o.top_k, token);
    if (least == best) {
        const int64_t first = std::max_element(row, row + vocab) - row;
        return expect((double)token, (double)first, 0, "first", vocab, o.top_k, first);
    }
    double before = 0, total = 0;
    for (int64_t i = 0; i < vocab; i++) {
        const float x = row[i] / o.temperature;
        const double weight = x >= threshold ? std::exp((double)x - best) : 0;
        if (i < token) before += weight;
        total += weight;
    }
    const double own = std::exp((double)(row[token] / o.temperature) - best);
    expect(point * total, before + own / 2, own / 2 + 1e-5 * total, "draw", vocab, o.top_k, token);
}

void check_draw(int64_t rows, int64_t vocab, float spread) {
    const int64_t blocks = (vocab + kPeak - 1) / kPeak, width = blocks * kPeak;
    std::unique_ptr<float[]> values(new float[rows * width]), peaks(new float[rows * blocks]), best(new float[rows]);
    std::unique_ptr<int64_t[]> numbers(new int64_t[4 * rows]);
    std::unique_ptr<double[]> reals(new double[3 * rows]);
    std::unique_ptr<float[]> heat(new float[rows]), thresholds(new float[rows]);
    std::vector<DrawOptions> options;
    for (int64_t r = 0; r < rows; r++) {
        float* row = values.get() + r * width;
        for (int64_t i = 0; i < width; i++) row[i] = i < vocab ? spread * uniform() : -INFINITY;
        for (int64_t i = 1; i < vocab && r % 3 == 1; i++) row[i] = i % 5 ? row[i] : -INFINITY;
        for (int64_t i = 0; i < vocab && r % 3 == 2; i++) row[i] = std::round(row[i]);
        const int64_t ks[] = {0, 1, 5, vocab / 2, vocab, vocab - 1};
        options.push_back({ks[r % 6], r % 5 < 2 ? 1.0 : 0.2 * (double)(r % 5), r % 4 ? 0 : 0.3, r % 7 ? 1.0f : 0.6f});
        numbers[r] = options[r].top_k, heat[r] = options[r].temperature;
        numbers[rows + r] = -5 - r, numbers[2 * rows + r] = r % 3, numbers[3 * rows + r] = 1000 * r;
        reals[r] = options[r].top_p, reals[rows + r] = options[r].min_p;
        reals[2 * rows + r] = uniform_of(numbers[rows + r], r % 3, 1000 * r);
    }
    const Maxima maxima{values.get(), peaks.get(), best.get(), blocks};
    run_one(kMaxima, &maxima, rows_only(rows));
    const Logits x{values.get(), peaks.get(), blocks, vocab};
    std::unique_ptr<int64_t[]> tokens(new int64_t[2 * rows]);
    Draw record{x,       nullptr, heat.get(), numbers.get(), reals.get(),  reals.get() + rows, reals.get() + 2 * rows,
                nullptr, nullptr, nullptr,    tokens.get(),  thresholds.get()};
    run_one(kDraw, &record, rows_only(rows));
    for (int64_t r = 0; r < rows; r++)
        check_draw_row(values.get() + r * width, vocab, options[r], reals[2 * rows + r], thresholds[r], tokens[r]);
    // The last row alone, by its number, with random numbers of its own.
    if (rows == 0) return;
    const int64_t last = rows - 1;
    record = {x, &last, heat.get() + last, numbers.get() + last, reals.get() + last, reals.get() + rows + last, nullptr,
              numbers.get() + rows + last, numbers.get() + 2 * rows + last, numbers.get() + 3 * rows + last,
              tokens.get() + rows, thresholds.get()};
    run_one(kDraw, &record, rows_only(1));
    expect((double)tokens[rows], (double)tokens[last], 0, "draw alone", rows, vocab, last);
}

void check_scores(int64_t rows, int64_t vocab, int64_t count) {
    const int64_t blocks = (vocab + kPeak - 1) / kPeak, width = blocks * kPeak;
    std::unique_ptr<float[]> values(new float[rows * width]), peaks(new float[rows * blocks]), best(new float[rows]);
    for (int64_t i = 0; i < rows * width; i++)
        values[i] = i % width < vocab && (i / width % 2 == 0 || i % width < 3) ? std::round(9 * uniform()) : -INFINITY;
    const Maxima maxima{values.get(), peaks.get(), best.get(), blocks};
    run_one(kMaxima, &maxima, rows_only(rows));
    std::unique_ptr<int64_t[]> tokens(new int64_t[rows]), above(new int64_t[rows]), ids(new int64_t[rows * count]);
    std::unique_ptr<double[]> norms(new double[rows]);
    std::unique_ptr<float[]> largest(new float[rows * count]);
    const Scores record{{values.get(), peaks.get(), blocks, vocab}, tokens.get(),  best.get(), above.get(),
                        norms.get(),  largest.get(), ids.get(),     count};
    run_one(kScores, &record, rows_only(rows));
    for (int64_t r = 0; r < rows; r++) {
        const float* row = values.get() + r * width;
        std::vector<int64_t> order(vocab);
        double sum = 0;
        for (int64_t i = 0; i < vocab; i++) order[i] = i, sum += std::exp((double)row[i]);
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return row[a] > row[b]; });
        expect(best[r], row[order[0]], 0, "best", rows, vocab, r);
        expect((double)tokens[r], (double)order[0], 0, "first greatest", rows, vocab, r);
        expect((double)above[r], 0, 0, "above the greatest", rows, vocab, r);
        expect(norms[r], std::log(sum), 1e-5, "norm", rows, vocab, r);
        for (int64_t i = 0; i < count; i++) {
            expect((double)ids[r * count + i], (double)order[i], 0, "largest", vocab, count, i);
            if (largest[r * count + i] != row[order[i]]) wrong++;
        }
    }
}

void check_sampling() {
    for (int64_t rows : {0, 1, 3, 43})
        for (int64_t vocab : {1, 2, 63, 64, 65, 200, 1000})
            for (float spread : {0.01f, 4.0f, 60.0f}) check_draw(rows, vocab, spread);
    for (int64_t rows : {0, 1, 5})
        for (int64_t vocab : {1, 3, 64, 65, 700})
            for (int64_t count : {1, 2, 50, 700}) check_scores(rows, vocab, std::min(count, vocab));
}
