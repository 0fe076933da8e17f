//! Building blocks for training programs: run files, run folders, the training loop, reports, signals and console
//! output.
//!
//! In: a folder, output as lines and rows, and signals. Out: the checkpoints of one run at a time, and an exit code
//! that shows whether output was lost. A failed write to the console or the log never ends the training.
//!
//! [`train`] executes a whole run that a run file ([`RunConfig`]) describes. Your own training program can also use the
//! building blocks:
//!
//! ```
//! use gapless::run::{Console, RunFolder, Stop};
//!
//! # let out = tempfile::tempdir()?;
//! let mut console = Console::default();
//! let folder = RunFolder::open(out.path())?; // refused while another run has it; nothing is changed yet
//! // … options, data, and a trainer: all that may be refused …
//! folder.claim()?;
//! if let Some(earlier) = folder.set_aside()? {
//!     console.say(format_args!("checkpoints of an earlier run are now in {}", earlier.display()));
//! }
//! let stop = Stop::on_signals()?;
//! while stop.signal().is_none() {
//!     // … trainer.step(…), folder.save(&mut trainer, …) …
//!     # break;
//! }
//! console.finish()?; // an error when something could not be written
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod config;
mod console;
mod error;
mod event;
mod export;
mod fit;
mod folder;
mod guard;
mod measure;
mod plan;
mod preflight;
mod references;
mod report;
mod routing;
mod saved;
mod stop;
mod summary;
mod train;
mod trained;

pub use config::{
    CheckpointConfig, ConfigError, DataConfig, EstimateConfig, EvaluationConfig, ExpertLoad, Fsdp2Config, GroupConfig,
    Lowering, MegatronConfig, ModelConfig, NAMES, OptimizerConfig, PRESETS, RateConfig, RateShape, RecordedLoad, Rule,
    RunConfig, SampleConfig, SourceConfig,
};
#[cfg(feature = "sweep")]
pub(crate) use config::{
    assign, flatten, key_of, line_of, move_former_names, refused, set, text_of, value_at, with_nearest,
};
pub use console::{Console, ErrorOutput, OutputLost};
pub use error::RunError;
pub use event::{Event, Seconds};
pub use fit::{CallbackResult, Ended, TrainingLoop, TrainingOutcome, sample, validation_windows};
pub use folder::RunFolder;
pub use guard::GuardConfig;
pub use measure::{EvaluationBatch, WindowLoss, validation_loss};
pub use plan::ContextBalance;
pub use references::{References, validation_rewards};
pub use report::{Report, ReportError, ReportServer, RunRecord};
use saved::say_changes;
pub use saved::{dataset, expect_same, with_saved};
pub use stop::{Stop, fail_at_file_limit};
pub use summary::Summary;
pub use train::{Progress, Start, train};
pub use trained::TrainedRun;
