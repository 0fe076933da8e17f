pub mod checkpoint;
pub mod cpu;
pub mod data;
pub mod learning_rate;
pub mod metrics;
