pub mod checkpoint;
pub mod cpu;
pub mod data;
