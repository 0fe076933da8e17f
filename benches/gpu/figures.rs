//! Medians, peak rates of devices, and rooflines.

use serde::Serialize;

use super::step::Float;

/// Returns the median, or `None` if there are no values.
pub fn median(mut numbers: Vec<f64>) -> Option<f64> {
    numbers.sort_by(f64::total_cmp);
    let middle = numbers.len() / 2;
    match numbers.len() {
        0 => None,
        even if even.is_multiple_of(2) => Some(f64::midpoint(numbers[middle - 1], numbers[middle])),
        _ => Some(numbers[middle]),
    }
}

/// Peak rates of a device, per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Peak {
    pub flops: f64,
    pub bytes: f64,
}

/// Peak rates from NVIDIA's data sheets of A100, H100 and H200. Each entry has the driver's name for the card, bf16
/// TFLOP/s (dense, on tensor cores), f32 TFLOP/s (without tensor cores), and GB/s. Only these names are known,
/// because variants of these cards have other rates.
const CARDS: [(&str, f64, f64, f64); 6] = [
    ("NVIDIA A100-SXM4-80GB", 312.0, 19.5, 2039.0),
    ("NVIDIA A100 80GB PCIe", 312.0, 19.5, 1935.0),
    ("NVIDIA A100-SXM4-40GB", 312.0, 19.5, 1555.0),
    ("NVIDIA H100 PCIe", 756.0, 51.0, 2000.0),
    ("NVIDIA H100 80GB HBM3", 989.0, 67.0, 3350.0),
    ("NVIDIA H200", 989.0, 67.0, 4800.0),
];

/// Peak rates given by the user, for unknown devices or instead of the values of NVIDIA's data sheets.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct PeakArguments {
    /// TFLOP/s of the device; by default, the value of NVIDIA's data sheet
    #[arg(long, value_name = "NUMBER", value_parser = above_zero)]
    peak_tflops: Option<f64>,
    /// GB/s of the device's memory, as measured for a copy; by default, the value of NVIDIA's data sheet
    #[arg(long, value_name = "NUMBER", value_parser = above_zero)]
    peak_gbs: Option<f64>,
}

impl PeakArguments {
    /// Returns the peak arithmetic rate of a card, or `None` if it is unknown.
    pub fn flops(&self, card: &str, dtype: Float) -> Option<f64> {
        let stated = |&(_, bf16, f32, _): &(&str, f64, f64, f64)| if dtype == Float::Bf16 { bf16 } else { f32 };
        self.peak_tflops.or_else(|| known(card).map(stated)).map(|tflops| tflops * 1e12)
    }

    /// Returns both peak rates, or `None` if one of them is unknown.
    pub fn peak(&self, card: &str, dtype: Float) -> Option<Peak> {
        let gbs = self.peak_gbs.or_else(|| known(card).map(|&(.., gbs)| gbs))?;
        Some(Peak { flops: self.flops(card, dtype)?, bytes: gbs * 1e9 })
    }
}

fn known(card: &str) -> Option<&'static (&'static str, f64, f64, f64)> {
    CARDS.iter().find(|(name, ..)| card == *name)
}

fn above_zero(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| format!("{text:?} is not a number"))?;
    if number.is_finite() && number > 0.0 {
        Ok(number)
    } else {
        Err(format!("{number} is not a rate; give a number above 0"))
    }
}

impl Peak {
    /// Returns the minimum time in seconds for this arithmetic and these bytes, by the roofline model (Williams,
    /// Waterman and Patterson, Communications of the ACM 52(4), 2009).
    pub fn seconds(&self, flops: u64, bytes: u64) -> f64 {
        (flops as f64 / self.flops).max(bytes as f64 / self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        for (numbers, expected) in
            [(vec![], None), (vec![3.0], Some(3.0)), (vec![9.0, 1.0], Some(5.0)), (vec![7.0, 1.0, 2.0], Some(2.0))]
        {
            assert_eq!(median(numbers), expected);
        }
    }

    #[test]
    fn rates_are_those_that_are_given_else_those_of_the_device() {
        let none = PeakArguments::default();
        let given = PeakArguments { peak_tflops: Some(700.0), peak_gbs: Some(3000.0) };
        for (arguments, card, dtype, expected) in [
            (none, "NVIDIA H100 PCIe", Float::Bf16, Some((756e12, 2000e9))),
            (none, "NVIDIA H100 80GB HBM3", Float::F32, Some((67e12, 3350e9))),
            (none, "NVIDIA H200", Float::Bf16, Some((989e12, 4800e9))),
            (none, "NVIDIA H200 NVL", Float::Bf16, None),
            (given, "NVIDIA H200 NVL", Float::Bf16, Some((700e12, 3000e9))),
            (PeakArguments { peak_gbs: None, ..given }, "NVIDIA A100-SXM4-80GB", Float::F32, Some((700e12, 2039e9))),
        ] {
            let expected = expected.map(|(flops, bytes)| Peak { flops, bytes });
            assert_eq!(arguments.peak(card, dtype), expected, "{card}");
        }
        assert!(above_zero("0").is_err() && above_zero("inf").is_err() && above_zero("x").is_err());
    }

    #[test]
    fn the_slower_of_both_decides() {
        let peak = Peak { flops: 100.0, bytes: 10.0 };
        assert_eq!((peak.seconds(1000, 10), peak.seconds(100, 50)), (10.0, 5.0));
    }
}
