// Where the elements of a warpgroup's factors lie in shared memory, by their matrix descriptor (PTX ISA, "Asynchronous warpgroup level
// matrix shared memory layout": strides, matrix descriptor, and the canonical layouts of each swizzling mode).
#ifndef GAPLESS_ON_HOST_WARPGROUP
#define GAPLESS_ON_HOST_WARPGROUP

struct Descriptor {
    // In bytes: the first element's address in the window of shared memory, and the two distances.
    unsigned start, leading, stride;
    // 0, 1, 2 and 3: none, 128, 64 and 32 bytes.
    unsigned mode;
    // What is not modelled, if it is asked for.
    bool is_strange;

    explicit Descriptor(unsigned long long bits)
        : start(unsigned(bits & 0x3fff) * 16),
          leading(unsigned(bits >> 16 & 0x3fff) * 16),
          stride(unsigned(bits >> 32 & 0x3fff) * 16),
          mode(unsigned(bits >> 62)),
          // The base offset, and bits that have no meaning.
          is_strange((bits & 0x3fffc000c000c000ull) != 0) {}

    // Bytes of a row of the swizzling pattern.
    unsigned width() const { return mode == 0 ? 16 : 256u >> mode; }

    // The address of element (mn, k), of 16 bits: mn is a row of a left factor, a column of a right one. `is_mn_major` says along which of
    // the two elements are neighbours.
    unsigned at(unsigned mn, unsigned k, bool is_mn_major) const {
        const unsigned along = is_mn_major ? mn : k, across = is_mn_major ? k : mn;
        const unsigned in_row = width() / 2, row = along / in_row, eight = across / 8;
        // Without a swizzle, rows of 16 bytes have the leading distance along k, and the other along mn. With one it is the other way
        // round where mn is the major dimension; along k there is one row, which a start within it may leave behind.
        unsigned offset = along % in_row * 2 + across % 8 * width();
        if (mode == 0) {
            offset += is_mn_major ? row * stride + eight * leading : row * leading + eight * stride;
        } else if (is_mn_major) {
            offset += row * leading + eight * stride;
        } else {
            offset = along * 2 + across % 8 * width() + eight * stride;
        }
        const unsigned address = start + offset;
        return address ^ (address >> 7 & (width() / 16 - 1)) << 4;
    }
};

#endif
