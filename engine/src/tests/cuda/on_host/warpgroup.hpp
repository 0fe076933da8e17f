// Decodes a matrix descriptor, and computes the addresses of an operand's elements in shared memory (PTX ISA,
// "Asynchronous warpgroup level matrix shared memory layout": strides, matrix descriptor, and the canonical layouts of
// each swizzling mode).
#ifndef GAPLESS_ON_HOST_WARPGROUP
#define GAPLESS_ON_HOST_WARPGROUP

struct Descriptor {
    // In bytes: the address of the first element in the window of shared memory, the leading distance, and the stride.
    unsigned start, leading, stride;
    // The swizzling mode. 0 means none; 1, 2 and 3 mean swizzles of 128, 64 and 32 bytes.
    unsigned mode;
    // True if the descriptor uses features that the simulation does not support.
    bool is_strange;

    explicit Descriptor(unsigned long long bits)
        : start(unsigned(bits & 0x3fff) * 16),
          leading(unsigned(bits >> 16 & 0x3fff) * 16),
          stride(unsigned(bits >> 32 & 0x3fff) * 16),
          mode(unsigned(bits >> 62)),
          // True if the base offset, or a bit without a meaning, is not zero.
          is_strange((bits & 0x3fffc000c000c000ull) != 0) {}

    // Returns the number of bytes per row of the swizzling pattern.
    unsigned width() const { return mode == 0 ? 16 : 256u >> mode; }

    // Returns the address of element (mn, k), which has 16 bits. mn is the row of a left operand, or the column of a
    // right operand. Neighboring elements are contiguous along mn if `is_mn_major`, and along k otherwise.
    unsigned at(unsigned mn, unsigned k, bool is_mn_major) const {
        const unsigned along = is_mn_major ? mn : k, across = is_mn_major ? k : mn;
        const unsigned in_row = width() / 2, row = along / in_row, eight = across / 8;
        // Without a swizzle, rows of 16 bytes are the leading distance apart along k, and the stride apart along mn. With
        // a swizzle:
        // - If elements are contiguous along mn, the leading distance is along mn and the stride along k.
        // - If elements are contiguous along k, all elements along k are in one row of the pattern. The descriptor may
        //   start inside of that row.
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
