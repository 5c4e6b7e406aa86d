// A matrix of random numbers, packed by the library.
#pragma once

#include "check.h"

// One matrix in panels. Of a pair, each panel is 32 rows of the first half of `rows`, then the same of the second.
struct Matrix {
    Numbers source, bias;
    pst_matrix m;
    Bytes data;

    static int32_t panels(int32_t rows, bool pair) { return pair ? (rows / 2 + 31) / 32 : (rows + 63) / 64; }
    static int64_t row_at(int32_t rows, bool pair, int32_t place) {
        if (!pair) return place < rows ? place : -1;
        int32_t i = place / 64 * 32 + place % 32;
        return i >= rows / 2 ? -1 : place % 64 < 32 ? i : rows / 2 + i;
    }
    Matrix(Pair kind, int32_t rows, int32_t cols, bool pair, Dice& dice)
        : source(dice.reals(size_t(rows * cols))), bias(size_t(panels(rows, pair) * 64), 0.125f),
          m(kind.matrix(rows, cols)), data(panels(rows, pair) * pst_panel_bytes(&m)) {
        m.pair = pair;
        std::vector<const void*> row_of(bias.size(), nullptr);
        for (size_t i = 0; i < row_of.size(); i++) {
            int64_t row = row_at(rows, pair, int32_t(i));
            if (row >= 0) row_of[i] = source.data() + row * cols;
        }
        pst_pack(&m, PST_F32, row_of.data(), 0, panels(rows, pair), data.data);
        m.data = data.data, m.bias = bias.data();
    }
};
