//! Trained weights, in a model that is not trained.

use std::path::Path;

use anyhow::ensure;
use gapless::models::hf::Folder;
use gapless::run::TrainedRun;
use gapless::{TrainOptions, Trainer};

/// The run at a path, if there is one. A Hugging Face folder, which it is else, has no averages to ask for.
pub fn run_at(path: &Path, average: bool) -> anyhow::Result<Option<TrainedRun>> {
    if !TrainedRun::is_at(path) {
        ensure!(!average, "a Hugging Face folder has no averages; leave --average out");
        return Ok(None);
    }
    let mut run = TrainedRun::open(path)?;
    run.average = average;
    Ok(Some(run))
}

/// A model of a folder, with its weights.
pub fn of_folder(folder: &Folder, options: TrainOptions) -> anyhow::Result<Trainer> {
    let mut trainer = Trainer::for_inference(|vb| folder.model(vb), options)?;
    folder.load(&mut trainer)?;
    Ok(trainer)
}
