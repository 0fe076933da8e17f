//! Convolutions. They are computed as matrix products of the kernel with the windows of the input that the kernel
//! covers.

use super::Tensor;
use crate::error::Result;

/// The positions of a kernel along one dimension.
#[derive(Debug, Clone, Copy)]
struct KernelStride {
    padding: usize,
    stride: usize,
    dilation: usize,
}

impl Tensor {
    /// Convolution of [batch, channels in, length] with a kernel [channels out, channels in ÷ groups, size].
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit, or if the kernel is longer than the padded input.
    pub fn conv1d(&self, kernel: &Self, padding: usize, stride: usize, dilation: usize, groups: usize) -> Result<Self> {
        let along = KernelStride { padding, stride, dilation };
        let across = KernelStride { padding: 0, stride: 1, dilation: 1 };
        self.unsqueeze(2)?.convolve(&kernel.unsqueeze(2)?, [across, along], groups)?.squeeze(2)
    }

    /// Convolution of [batch, channels in, height, width] with a kernel [channels out, channels in ÷ groups, height, width].
    ///
    /// # Errors
    /// Returns an error if the shapes do not fit, or if the kernel is larger than the padded input.
    pub fn conv2d(&self, kernel: &Self, padding: usize, stride: usize, dilation: usize, groups: usize) -> Result<Self> {
        self.convolve(kernel, [KernelStride { padding, stride, dilation }; 2], groups)
    }

    fn convolve(&self, kernel: &Self, [down, along]: [KernelStride; 2], groups: usize) -> Result<Self> {
        let ((batch, channels, ..), (out, of_group, high, wide)) = (self.dims4()?, kernel.dims4()?);
        if groups == 0 || channels != of_group * groups || !out.is_multiple_of(groups) {
            let what = format!("{channels} channels in {groups} groups do not fit a kernel {:?}", kernel.dims());
            return Err(self.shape_error("convolution", what));
        }
        // The elements that the kernel covers at each position: [batch, channels, rows, high, columns, wide].
        let seen = self.windows(2, high, down)?.windows(4, wide, along)?;
        let (rows, columns, size) = (seen.dims()[2], seen.dims()[4], of_group * high * wide);
        if groups == 1 {
            let seen = seen.permute([0, 2, 4, 1, 3, 5])?.reshape((batch, rows * columns, size))?;
            let made = seen.linear(&kernel.reshape((out, size))?, None)?;
            return made.transpose(1, 2)?.reshape((batch, out, rows, columns));
        }
        let seen = seen.permute([0, 1, 3, 5, 2, 4])?.reshape((batch, groups, size, rows * columns))?;
        let kernel = kernel.reshape((1, groups, out / groups, size))?;
        let kernel = kernel.broadcast_as((batch, groups, out / groups, size))?;
        kernel.matmul(&seen)?.reshape((batch, out, rows, columns))
    }

    /// Splits dimension `dim` into two: the positions of a kernel of `size` elements, and the elements that the kernel
    /// covers at each position.
    fn windows(&self, dim: usize, size: usize, walk: KernelStride) -> Result<Self> {
        let KernelStride { padding, stride, dilation } = walk;
        let extent = self.dims()[dim] + 2 * padding;
        let span = dilation * size.saturating_sub(1) + 1;
        if size == 0 || stride == 0 || dilation == 0 || span > extent {
            let what = format!(
                "a kernel of {size} (stride {stride}, dilation {dilation}) does not fit dimension {dim} of extent {extent}"
            );
            return Err(self.shape_error("convolution", what));
        }
        let places = (extent - span) / stride + 1;
        let split = |x: &Self, [first, second]: [usize; 2]| {
            x.reshape([&x.dims()[..dim], &[first, second], &x.dims()[dim + 1..]].concat())
        };
        if dilation == 1 && stride == size {
            let padded = self.pad_with_zeros(dim, padding, padding)?;
            return split(&padded.narrow(dim, 0, places * stride)?, [places, size]);
        }
        // Each kernel element reads every `stride`th index of a range of the input.
        let needed = dilation * (size - 1) + places * stride;
        let padded = self.pad_with_zeros(dim, padding, padding + needed.saturating_sub(extent))?;
        let seen_by = |element: usize| {
            let range = padded.narrow(dim, element * dilation, places * stride)?;
            split(&range, [places, stride])?.narrow(dim + 1, 0, 1)
        };
        let seen = (0..size).map(seen_by).collect::<Result<Vec<_>>>()?;
        Self::cat(&seen, dim + 1)
    }
}
