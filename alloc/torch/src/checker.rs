//! Checks that living requests share no byte. It knows nothing of the allocator.

use std::collections::BTreeMap;

use crate::script::ALIGNMENT;

/// The living requests, by address.
#[derive(Debug, Default)]
pub(crate) struct Checker {
    living: BTreeMap<u64, u64>,
}

impl Checker {
    /// Checks a request that was just served.
    ///
    /// # Errors
    /// Returns the violation.
    pub fn allocated(&mut self, address: u64, bytes: u64) -> Result<(), String> {
        if !address.is_multiple_of(ALIGNMENT) {
            return Err(format!("address {address:#x} is not a multiple of {ALIGNMENT}"));
        }
        let below = self.living.range(..=address).next_back().filter(|&(&start, &size)| start + size > address);
        let above = self.living.range(address..).next().filter(|&(&start, _)| start < address + bytes);
        if let Some((start, size)) = below.or(above) {
            return Err(format!("{bytes} bytes at {address:#x} overlap the living {size} bytes at {start:#x}"));
        }
        self.living.insert(address, bytes);
        Ok(())
    }

    /// Checks a free.
    ///
    /// # Errors
    /// Returns the violation.
    pub fn freed(&mut self, address: u64, bytes: u64) -> Result<(), String> {
        match self.living.remove(&address) {
            Some(size) if size == bytes => Ok(()),
            Some(size) => Err(format!("{bytes} bytes at {address:#x} are freed, but {size} were requested")),
            None => Err(format!("{address:#x} is freed, but not alive")),
        }
    }
}
