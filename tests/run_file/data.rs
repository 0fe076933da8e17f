//! What a run learns from: answers to prompts, documents that do not see each other, and mixtures.

use gapless::run::{Console, RateConfig, RateShape, RunConfig, Start, train};

use crate::{Place, TINY, losses};

/// Answers to prompts, and documents that do not see each other: they are learned, a file's run is the library's, and it resumes.
#[test]
fn answers_and_isolated_documents_are_learned() {
    let place = Place::new();
    let questions = ["to be", "or not", "that is", "the"].map(|word| {
        format!("{{\"prompt\": \"{word}?\", \"completion\": \" {}\"}}\n", word.chars().rev().collect::<String>())
    });
    std::fs::write(place.path().join("lines.jsonl"), questions.concat().repeat(8)).unwrap();
    for (from, to) in [
        ("text.txt\"", "lines.jsonl\"\nformat = \"prompt\""),
        ("vocabulary = 256", "vocabulary = 256\nisolate_documents = true"),
    ] {
        let file = place.file(&TINY.replacen(from, to, 1));
        let settings = ["steps=60", "learning_rate.peak=1e-2", "sample.temperature=0.0"].map(str::to_owned);
        let config = RunConfig::read(&file, &settings).unwrap();
        let out = place.path().join(if config.data.has_documents() && to.contains("format") {
            "answers"
        } else {
            "isolated"
        });
        let whole = train(&config, &out, &Start::Anew, &mut Console::default(), |_| {}).unwrap();
        let rows = losses(&out.join("metrics.jsonl"));
        let (first, last) = (f32::from_bits(rows[0].1), whole.final_loss.unwrap());
        assert!(last < 0.6 * first, "{to}: {first} became {last}");
        assert!(whole.val_loss.is_some_and(|loss| loss < 0.7 * first), "{to}: {whole:?}");
        // The same in two halves.
        let cut = place.path().join("cut");
        let half = RunConfig { steps: 30, ..config.clone() };
        let constant = |config: &RunConfig| RunConfig {
            learning_rate: RateConfig { shape: RateShape::Constant, warmup_steps: 0, ..config.learning_rate },
            ..config.clone()
        };
        train(&constant(&half), &cut, &Start::Anew, &mut Console::default(), |_| {}).unwrap();
        train(&constant(&config), &cut, &Start::Resume, &mut Console::default(), |_| {}).unwrap();
        let uncut = place.path().join("uncut");
        train(&constant(&config), &uncut, &Start::Anew, &mut Console::default(), |_| {}).unwrap();
        assert_eq!(losses(&cut.join("metrics.jsonl")), losses(&uncut.join("metrics.jsonl")), "{to}");
        [cut, uncut].iter().for_each(|folder| std::fs::remove_dir_all(folder).unwrap());
    }
}

/// Sources of a mixture have the windows that their weights say, with one vocabulary that is trained on all of them, and a run goes on in
/// the same windows.
#[test]
fn sources_are_mixed_by_weight() {
    let place = Place::new();
    let folder = place.path();
    std::fs::write(folder.join("letters.txt"), "XYZZY YXZ ZZZY XY\n".repeat(300)).unwrap();
    let mix = "vocabulary = 280\nmix = [{ path = \"DIR/letters.txt\", weight = 0.25 }]";
    let file = place.file(&TINY.replace("vocabulary = 256", mix));
    let read = |steps: &str| RunConfig::read(&file, &[steps.to_owned()]).unwrap();
    let dataset = read("steps=4").dataset().unwrap();
    assert_eq!(dataset.vocabulary().size(), 280);
    let windows = dataset.training(16, 8, 3).unwrap();
    let (mut tokens, mut targets) = (vec![0; 128], vec![0; 128]);
    let mut of_letters = 0;
    for step in 0..512 {
        windows.fill(step, 0, &mut tokens, &mut targets).unwrap();
        let is_of_letters = |ids: &&[u32]| dataset.vocabulary().decode(ids).unwrap().contains('Z');
        of_letters += tokens.chunks(16).filter(is_of_letters).count();
    }
    assert_eq!(of_letters, 1024, "a quarter of 4096");
    let validation = dataset.validation(16, 32).unwrap().unwrap();
    assert!((8..=32).contains(&validation.count()));
    let go =
        |steps, name: &str, start| train(&read(steps), &folder.join(name), &start, &mut Console::default(), |_| {});
    go("steps=4", "whole", Start::Anew).unwrap();
    go("steps=2", "parts", Start::Anew).unwrap();
    go("steps=4", "parts", Start::Resume).unwrap();
    let rows = |name: &str| losses(&folder.join(name).join("metrics.jsonl"));
    assert_eq!(rows("whole")[..2], rows("parts")[..2]);
}
