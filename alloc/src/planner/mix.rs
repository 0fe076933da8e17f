//! Mixes words into bits that look random and are the same on every machine.

/// 64 well-mixed bits of two words.
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ b.wrapping_mul(0xC2B2_AE3D_27D4_EB4F);
    x = (x ^ (x >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x = (x ^ (x >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x ^ (x >> 32)
}

/// 128 well-mixed bits of two words.
pub(crate) fn mix128(a: u64, b: u64) -> u128 {
    u128::from(mix(a, b.wrapping_add(1))) << 64 | u128::from(mix(a, b.wrapping_add(2)))
}
