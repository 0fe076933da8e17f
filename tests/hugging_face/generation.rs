//! Compares greedy continuations, generated with caches, with those of transformers.

use candle_core::DType;
use gapless::models::hf::{Folder, GenerationConfig};
use gapless::{DeviceChoice, GenerateOptions, Generation, Sampling, StepOptions, TrainOptions, Trainer};

use crate::case::{Case, unsupported};

/// Total length of the prompt and its continuation.
const WINDOW: usize = 21;

#[test]
fn greedy_continuations_are_those_of_transformers() {
    let mut checked = 0;
    for case in Case::all() {
        let folder = match Folder::open(&case.checkpoint) {
            Ok(folder) => folder,
            Err(error) => {
                println!("{:<24} refused: {}", case.name, unsupported(&error).expect("that is all there is to it"));
                continue;
            }
        };
        let u32s = |name: &str| -> Vec<u32> {
            case.expected[name].flatten_all().unwrap().to_dtype(DType::U32).unwrap().to_vec1().unwrap()
        };
        let (prompt, expected) = (u32s("generate.prompt"), u32s("generate.tokens"));
        let config = GenerationConfig::read(&case.checkpoint).unwrap();
        assert!(!config.do_sample && config.not_followed.is_empty(), "{}: {config:?}", case.name);
        assert_eq!(config.default_sampling(), Sampling::greedy());
        let end = case.about["generate"]["stops_after"].as_u64().map_or(expected.len(), |after| after as usize);
        // The prompt is read in one chunk or in several, alone or together with another sequence.
        for (batch, chunk) in [(1, 128), (2, 2)] {
            let generation = Some(Generation { batch, window: Some(WINDOW), chunk });
            let options = TrainOptions {
                step: StepOptions { batch: 1, sequence: WINDOW, generation, ..StepOptions::default() },
                device: DeviceChoice::Cpu,
                threads: 2,
                ..TrainOptions::default()
            };
            let mut model = Trainer::builder(|vb| folder.model(vb), options).for_inference().build().unwrap();
            folder.load(&mut model).unwrap();
            let mut generate = |stop: &[u32]| {
                let options = GenerateOptions { stop: stop.to_vec(), ..GenerateOptions::greedy(expected.len()) };
                let prompts = [&prompt[..], &prompt[..2]];
                model.generate(&prompts[..batch], &options, |_| std::ops::ControlFlow::Continue(())).unwrap().remove(0)
            };
            assert_eq!(generate(&[]), expected, "{}, {batch} × {chunk}", case.name);
            assert_eq!(generate(&config.stop), expected[..end], "{}, which stops", case.name);
            checked += 1;
        }
    }
    assert!(checked > 0);
}
