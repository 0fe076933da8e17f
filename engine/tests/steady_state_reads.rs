//! Checks with a counting allocator that a training step allocates nothing for reading data and writing metrics, and that
//! resuming reads a checkpoint in blocks.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use gapless_engine::checkpoint::Checkpoint;
use gapless_engine::communicator;
use gapless_engine::data::{DataOptions, Dataset, Source, VocabularyChoice};
use gapless_engine::learning_rate::{LearningRate, Shape};
use gapless_engine::metrics::{JsonLines, available_memory_bytes, current_rss_bytes, peak_rss_bytes};
use gapless_engine::nn::{Embedding, Module, VarBuilder, embedding};
use gapless_engine::{Model, Result, StepOptions, Tensor, TrainError, TrainOptions, Trainer, UpdateOptions};
use gapless_parallel::Mesh;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    /// Bytes of the largest allocation.
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is passed on to the system's allocator unchanged. Counting only uses thread-local variables
// that need no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        LARGEST.set(LARGEST.get().max(layout.size()));
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(run: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    run();
    ALLOCATIONS.get() - before
}

#[derive(serde::Serialize)]
struct Row {
    step: u64,
    loss: f32,
    lr: f64,
    rss_bytes: Option<u64>,
}

#[test]
fn batches_metrics_and_memory_figures_allocate_nothing() {
    assert_eq!(allocations(|| drop(std::hint::black_box(Box::new(1)))), 1, "the allocator counts");

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text.txt");
    std::fs::write(&file, "to be or not to be, that is the question\n".repeat(500)).unwrap();
    let options = DataOptions {
        vocabulary: VocabularyChoice::Bytes,
        cache: folder.path().join("cache"),
        ..DataOptions::default()
    };
    let dataset = Dataset::prepare(&Source::Path(file), &options).unwrap();
    let training = dataset.training(64, 4, 1).unwrap();
    let validation = dataset.validation(64, 4).unwrap().unwrap();
    let learning_rate =
        LearningRate { peak: 1e-3, floor: 0.0, warmup_steps: 10, steps: 100, shape: Shape::Cosine }.check().unwrap();
    let mut metrics = JsonLines::create(&folder.path().join("metrics.jsonl")).unwrap();
    let (mut inputs, mut targets) = (vec![0; 256], vec![0; 256]);

    // The first call allocates, because it looks up the process's control groups.
    assert!(available_memory_bytes().is_some());
    let counted = allocations(|| {
        for step in 0..100 {
            training.fill(step, 0, &mut inputs, &mut targets).unwrap();
            validation.fill(0, &mut inputs, &mut targets).unwrap();
            let rss_bytes = current_rss_bytes().max(peak_rss_bytes()).min(available_memory_bytes());
            let row = Row { step, loss: 1.0 / (step + 3) as f32, lr: learning_rate.at(step), rss_bytes };
            metrics.write(&row).unwrap();
        }
    });
    assert_eq!(counted, 0);
}

/// A table, whose 4 MiB are more than a block, as scores.
struct Table(Embedding);

impl Table {
    fn new(vb: VarBuilder) -> Result<Self> {
        embedding(1024, 1024, vb).map(Self)
    }
}

impl Model for Table {
    fn forward(&self, tokens: &Tensor, _train: bool) -> Result<Tensor> {
        self.0.forward(tokens)
    }
}

#[test]
fn resuming_allocates_blocks_of_at_most_a_mebibyte() {
    let options = |data| TrainOptions {
        step: StepOptions {
            batch: 2,
            sequence: 1,
            mesh: Mesh { data, ..Mesh::default() },
            update: UpdateOptions { average: Some(0.9), ..UpdateOptions::default() },
            ..StepOptions::default()
        },
        threads: 1,
        ..TrainOptions::default()
    };
    let folder = tempfile::tempdir().unwrap();
    let saved = communicator::on_threads(2, |world| {
        let mut trainer = Trainer::builder(Table::new, options(2)).distributed(world).build()?;
        trainer.save(folder.path(), serde_json::Value::Null)
    });
    let checkpoint = Checkpoint::open(&saved.unwrap()[0]).unwrap();
    let mut trainer = Trainer::new(Table::new, options(1)).unwrap();
    let mut largest = |run: &mut dyn FnMut(&mut Trainer) -> std::result::Result<(), TrainError>| {
        LARGEST.set(0);
        run(&mut trainer).unwrap();
        LARGEST.get()
    };
    let of_resume = largest(&mut |trainer| trainer.resume(&checkpoint).map(drop));
    let of_average = largest(&mut |trainer| trainer.load_average(&checkpoint));
    assert!(of_resume > 0 && of_resume <= 1 << 20, "{of_resume} bytes");
    assert!(of_average > 0 && of_average <= 1 << 20, "{of_average} bytes");
}
