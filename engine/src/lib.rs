pub mod cpu;
pub mod data;
