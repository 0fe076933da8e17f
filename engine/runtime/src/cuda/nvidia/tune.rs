//! The choice of cuBLASLt's algorithm for each form of product.
//!
//! The library's first proposal is a guess. For results of few tiles, another algorithm can be twice as fast. So when
//! a device first has a product of a new form, all proposals are timed on zeros. The fastest is cached next to the
//! compiled kernels, by card, driver and library version. As long as that file exists, results have the same bits
//! from run to run. `GAPLESS_TUNE=off` uses the first proposal instead.

use std::collections::BTreeMap;
use std::time::Duration;

use cudarc::driver::result;
use gapless_kernels::cuda::launch::Product;

use super::Nvidia;
use super::launch::Tried;
use crate::cuda::context::exclusive;
use crate::cuda::cublaslt::CublasLt;
use crate::cuda::device::{Describe, DeviceError};
use crate::cuda::event;
use crate::cuda::named::Named;

/// The environment variable that disables timing if its value is "off".
const VARIABLE: &str = "GAPLESS_TUNE";

/// Number of products in each timing. One more product runs before them, so that the algorithm's code is loaded.
const TIMED: u32 = 3;

impl Nvidia {
    /// Runs products of new forms on zeros, and selects the algorithm of each form. This also makes the library load
    /// its kernels, which it may do at their first start and cannot do while a stream is being captured. The
    /// products' operands are overwritten, so they must be initialized afterwards.
    pub(super) fn try_out(&mut self, chosen: &Tried, describe: Describe<'_>) -> Result<(), DeviceError> {
        if chosen.is_empty() {
            return Ok(());
        }
        let _exclusive = exclusive();
        let is_off = std::env::var(VARIABLE).is_ok_and(|value| value == "off");
        let device = [self.card.clone(), self.driver.to_string(), self.products.version().to_string()];
        let known = if is_off { BTreeMap::new() } else { self.cache.choices(&device) };
        let mut measured = BTreeMap::new();
        for (index, product) in chosen {
            let what_for = |error: DeviceError| error.during(&describe(*index));
            for (address, bytes) in product.reads() {
                // SAFETY: the addresses come from a checked plan, in memory as large as the plan.
                let zeroed = unsafe { result::memset_d8_async(address, 0, bytes, self.stream.handle()) };
                zeroed.named(&self.name, "cuMemsetD8Async").map_err(what_for)?;
            }
            let form = CublasLt::form(product);
            if let Some(&answer) = known.get(&form) {
                self.products.set_answer(product, answer);
            } else if !is_off && self.driver >= event::FIRST_VERSION && self.products.answers(product) > 1 {
                let (answer, time) = self.fastest(product).map_err(what_for)?;
                self.products.set_answer(product, answer);
                measured.insert(form, answer);
                let &Product { m, n, k, a, b, ref batch, .. } = product;
                let tflops = product.flops() as f64 / time.as_secs_f64().max(1e-9) / 1e12;
                tracing::info!(
                    product = %format_args!("{}×{m}×{n}×{k}{}{}", batch.count, if a.is_transposed { " At" } else { "" }, if b.is_transposed { " Bt" } else { "" }),
                    dtype = a.dtype.as_str(),
                    algorithm = self.products.algorithm(product),
                    tflops = %format_args!("{tflops:.0}"),
                    "the fastest of cuBLASLt's algorithms"
                );
            }
            // SAFETY: as above.
            unsafe { self.products.start(product, self.stream.handle()) }.map_err(what_for)?;
        }
        if !measured.is_empty() {
            self.cache.keep_choices(&device, &measured);
        }
        Ok(())
    }

    /// Returns the index of the fastest algorithm for a product, and the time of one product.
    fn fastest(&mut self, product: &Product) -> Result<(usize, Duration), DeviceError> {
        let mut fastest = (0, Duration::MAX);
        for answer in 0..self.products.answers(product) {
            let time = self.timed(product, answer)?;
            if time < fastest.1 {
                fastest = (answer, time);
            }
        }
        Ok(fastest)
    }

    fn timed(&mut self, product: &Product, answer: usize) -> Result<Duration, DeviceError> {
        self.products.set_answer(product, answer);
        let start = || {
            // SAFETY: the addresses come from a checked plan, in memory as large as the plan.
            unsafe { self.products.start(product, self.stream.handle()) }
        };
        start()?;
        let from = self.mark()?;
        (0..TIMED).try_for_each(|_| start())?;
        let to = self.mark()?;
        self.stream.synchronize()?;
        Ok(to.since(&from, &self.name)? / TIMED)
    }
}
