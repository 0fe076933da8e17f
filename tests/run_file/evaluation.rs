//! The validation loss only depends on the windows. The batch size of the evaluation does not change it.

use gapless::engine::data::{Format, IGNORED, VocabularyChoice};
use gapless::models::{Llama, LlamaConfig};
use gapless::run::{EvaluationBatch, validation_loss};
use gapless::{
    Batch, DataOptions, Dataset, DeviceChoice, MemoryOptions, Mesh, StepOptions, TrainOptions, Trainer, communicator,
};

const SEQUENCE: usize = 12;

/// Creates a dataset, either of conversations of different lengths, some of which are packed together, or of one
/// text.
fn dataset(folder: &std::path::Path, format: Format) -> Dataset {
    let vocabulary = VocabularyChoice::Bytes;
    let options =
        DataOptions { vocabulary, validation_every: 2, cache: folder.join("cache"), ..DataOptions::default() };
    let line = |i: usize| {
        format!("{{\"prompt\": \"{i}? \", \"completion\": \"{}\"}}\n", "ab cd efgh"[..1 + i * i % 9].to_owned())
    };
    match format {
        Format::Text => {
            let file = folder.join("text.txt");
            std::fs::write(&file, "the quick brown fox jumps over a lazy dog. ".repeat(40)).unwrap();
            Dataset::prepare(&file.into(), &DataOptions { validation_every: 10, ..options }).unwrap()
        }
        _ => {
            let file = folder.join("lines.jsonl");
            std::fs::write(&file, (0..46).map(line).collect::<String>()).unwrap();
            Dataset::examples(&file, format, &options).unwrap()
        }
    }
}

fn options(batch: usize, documents: bool) -> TrainOptions {
    let (device, planning) = (DeviceChoice::Cpu, 1 << 20);
    TrainOptions {
        step: StepOptions {
            batch,
            sequence: SEQUENCE,
            documents,
            memory: MemoryOptions { planning, ..MemoryOptions::default() },
            ..StepOptions::default()
        },
        device,
        threads: 1,
        seed: 5,
        ..TrainOptions::default()
    }
}

fn llama() -> LlamaConfig {
    LlamaConfig { vocabulary: 256, layers: 1, heads: 2, kv_heads: 1, width: 16, hidden: 24, ..LlamaConfig::default() }
}

#[test]
fn the_validation_loss_does_not_depend_on_the_batch() {
    for format in [Format::Text, Format::Prompt] {
        let folder = tempfile::tempdir().unwrap();
        let dataset = dataset(folder.path(), format);
        let documents = format != Format::Text;
        let windows = dataset.validation(SEQUENCE, 11).unwrap().unwrap();
        assert!(windows.count() > 8, "{format:?}: {}", windows.count());

        // The reference evaluates each window alone, and weights the loss by the window's number of targets that
        // count.
        let mut one = Trainer::new(|vb| Llama::new(&llama(), vb), options(1, documents)).unwrap();
        let (mut sum, mut counted) = (0.0, 0);
        for window in 0..windows.count() {
            let mut room = EvaluationBatch::new(&one);
            let [tokens, targets, starts] = room.windows(1, SEQUENCE);
            windows.fill_documents(window, tokens, targets, starts).unwrap();
            let own = targets.iter().filter(|&&target| target != IGNORED).count();
            let loss = one.evaluate_batch(&Batch { tokens, targets, starts }).unwrap();
            (sum, counted) = (sum + f64::from(loss) * own as f64, counted + own);
        }
        let expected = (sum / counted as f64) as f32;
        let expect = |what: &str, loss: Option<f32>| {
            let loss = loss.unwrap();
            // The tolerance allows for rounding in means of some hundreds of f32 values.
            assert!((loss - expected).abs() <= 2e-6 * expected, "{format:?}, {what}: {loss} is not {expected}");
        };
        for batch in [1, 2, 3, 4, 7, 8, windows.count(), 16, 40] {
            let mut trainer = Trainer::new(|vb| Llama::new(&llama(), vb), options(batch, documents)).unwrap();
            expect(&format!("batch {batch}"), validation_loss(&mut trainer, &windows).unwrap());
        }
        let ranks = TrainOptions {
            step: StepOptions {
                micro_batches: 3,
                mesh: Mesh { data: 2, ..Mesh::default() },
                ..options(24, documents).step
            },
            ..options(24, documents)
        };
        let on_ranks = |world| {
            let mut trainer =
                Trainer::builder(|vb| Llama::new(&llama(), vb), ranks.clone()).distributed(world).build()?;
            Ok(validation_loss(&mut trainer, &windows).unwrap())
        };
        communicator::on_threads(2, on_ranks).unwrap().into_iter().for_each(|loss| expect("on ranks", loss));
        let mut other = Trainer::new(
            |vb| Llama::new(&llama(), vb),
            TrainOptions { step: StepOptions { sequence: 6, ..options(4, documents).step }, ..options(4, documents) },
        )
        .unwrap();
        let error = validation_loss(&mut other, &windows).unwrap_err().to_string();
        assert!(error.contains("tokens of a window"), "{error}");
    }
}
