//! The resources that a kernel uses: registers, stack, spills and shared memory.
//!
//! - In: the log of NVRTC. Its assembler reports resources if `--ptxas-options=-v` is given.
//! - Out: the resources of each kernel.
//! - Never: resources of a kernel that the log does not mention.

use serde::Serialize;

/// The resources that the assembler reserved for one kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Resources {
    /// The kernel's name.
    pub kernel: String,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of local memory per thread. It holds arrays with computed indices, and spilled registers.
    pub stack_bytes: u32,
    /// Bytes per thread of spill stores, summed over the kernel's functions.
    pub spill_store_bytes: u32,
    /// Bytes per thread of spill loads, summed over the kernel's functions.
    pub spill_load_bytes: u32,
    /// Bytes of shared memory per block that the source declares. Dynamic shared memory is not included.
    pub shared_bytes: u32,
    /// True if the assembler warns that it waits for each product of a warpgroup before the next instruction.
    /// Products then do not overlap with other work.
    pub is_serialized: bool,
}

impl Resources {
    /// Reads the resources of all kernels from a log, in the log's order.
    pub(super) fn of_log(log: &str) -> Vec<Self> {
        let mut kernels: Vec<Self> = Vec::new();
        for line in log.lines() {
            if let Some((_, rest)) = line.split_once("Compiling entry function '") {
                let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
                kernels.push(Self {
                    kernel,
                    registers: 0,
                    stack_bytes: 0,
                    spill_store_bytes: 0,
                    spill_load_bytes: 0,
                    shared_bytes: 0,
                    is_serialized: false,
                });
            }
            let Some(last) = kernels.last_mut() else { continue };
            // The log contains such a line for the kernel itself, and one for each function of the kernel that was
            // not inlined.
            if line.contains("bytes stack frame") {
                last.stack_bytes = last.stack_bytes.max(before(line, " bytes stack frame"));
                last.spill_store_bytes += before(line, " bytes spill stores");
                last.spill_load_bytes += before(line, " bytes spill loads");
            }
            if line.contains(" registers") {
                last.registers = before(line, " registers");
                last.shared_bytes = before(line, " bytes smem");
            }
        }
        // Warnings appear in the log before all kernels.
        for line in log.lines().filter(|line| line.contains("instructions are serialized")) {
            let is_meant = |kernel: &&mut Self| line.contains(&format!("'{}'", kernel.kernel));
            kernels.iter_mut().filter(is_meant).for_each(|kernel| kernel.is_serialized = true);
        }
        kernels
    }
}

/// Returns the integer before `words` in a line. Returns 0 if the line does not contain these words.
fn before(line: &str, words: &str) -> u32 {
    let number = line.split_once(words).and_then(|(front, _)| front.rsplit(' ').next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_tells_of_every_kernel() {
        let log = "\
ptxas info    : (C7520) Potential Performance Loss: wgmma.mma_async instructions are serialized due to this in the function 'full_bf16'
ptxas info    : 36 bytes gmem, 72 bytes cmem[4]
ptxas info    : Compiling entry function 'plain_f32' for 'sm_90'
ptxas info    : Function properties for plain_f32
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
ptxas info    : Compile time = 136.845 ms
ptxas info    : Compiling entry function 'full_bf16' for 'sm_90'
ptxas info    : Function properties for full_bf16
ptxas         .     24 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Function properties for called
ptxas         .     16 bytes stack frame, 2 bytes spill stores, 1 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 512 bytes smem, 400 bytes cmem[0]
";
        let resources = |kernel: &str, figures: [u32; 5]| {
            let [registers, stack_bytes, spill_store_bytes, spill_load_bytes, shared_bytes] = figures;
            let kernel = kernel.to_owned();
            let is_serialized = kernel == "full_bf16";
            Resources {
                kernel,
                registers,
                stack_bytes,
                spill_store_bytes,
                spill_load_bytes,
                shared_bytes,
                is_serialized,
            }
        };
        let expected = [resources("plain_f32", [40, 0, 0, 0, 0]), resources("full_bf16", [255, 24, 6, 9, 512])];
        assert_eq!(Resources::of_log(log), expected);
        assert_eq!(Resources::of_log("a warning\n"), []);
    }
}
