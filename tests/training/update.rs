//! Parts of the update in addition to its rule, and terms of the loss in addition to the likelihood.

use candle_core::DType;
use gapless::{
    AdamW, Lion, LossTerms, Mesh, ParameterGroup, Pipeline, SkipThresholds, StepOptions, Trainer, UpdateOptions,
};

use crate::common::{Kind, Outcome, TinyRun};

fn numbers(trainer: &Trainer, name: &str) -> Vec<f32> {
    trainer.tensor(name).unwrap().flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}

/// Parameters and states.
fn all(trainer: &Trainer) -> Vec<(String, Vec<f32>)> {
    let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
    let states =
        ["exp_avg", "exp_avg_sq", "average"].map(|kind| names.iter().map(move |name| format!("{kind}/{name}")));
    let states: Vec<String> = states.into_iter().flatten().collect();
    names.iter().chain(&states).map(|name| (name.clone(), numbers(trainer, name))).collect()
}

fn with(update: UpdateOptions) -> TinyRun {
    let mut run = TinyRun::default();
    run.options.step.update = update;
    run.options.poison = true;
    run
}

fn group(names: &[&str], learning_rate: f64) -> ParameterGroup {
    let names = names.iter().map(|&name| name.to_owned()).collect();
    ParameterGroup { names, optimizer: AdamW::default().into(), learning_rate }
}

/// All update options at once.
fn everything() -> UpdateOptions {
    let groups = vec![
        group(&["*.bias", "*ln_*"], 0.5),
        ParameterGroup { optimizer: Lion::default().into(), ..group(&["h.1"], 0.1) },
    ];
    UpdateOptions { groups, max_value: Some(1e-2), guarded: true, average: Some(0.9) }
}

#[test]
fn a_step_above_its_limits_changes_nothing() {
    let run = with(UpdateOptions { guarded: true, average: Some(0.9), ..UpdateOptions::default() });
    let mut trainer = run.trainer();
    let first = run.step(&mut trainer);
    assert!(!first.skipped);
    let before = all(&trainer);
    let below = |x: f32| 0.5 * x;
    for limits in [
        SkipThresholds { loss: below(first.loss), ..SkipThresholds::default() },
        SkipThresholds { gradient_norm: below(first.gradient_norm), ..SkipThresholds::default() },
    ] {
        trainer.set_limits(limits);
        let report = run.step(&mut trainer);
        assert!(report.skipped && report.loss.is_finite() && report.gradient_norm.is_finite(), "{report:?}");
        assert_eq!(all(&trainer), before);
    }
    // A step whose loss or gradient norm is not finite is skipped, too. The next step is normal.
    trainer.set_limits(SkipThresholds::default());
    let name = "wte.weight";
    let mut broken = numbers(&trainer, name);
    let sound = broken.clone();
    broken.fill(f32::NAN);
    trainer.set_elements(name, &broken).unwrap();
    assert!(run.step(&mut trainer).skipped);
    trainer.set_elements(name, &sound).unwrap();
    assert!(!run.step(&mut trainer).skipped);
    assert_ne!(all(&trainer), before);
    assert_eq!(trainer.steps(), 5);
}

/// A run with a guard that skips no step has the same bits as one without a guard.
#[test]
fn a_guard_that_leaves_nothing_out_changes_no_bit() {
    let plain = TinyRun::default().steps(3);
    assert_eq!(with(UpdateOptions { guarded: true, ..UpdateOptions::default() }).steps(3), plain);
    // An average changes no bit, and neither does a parameter group with the same rule and rate as the others.
    assert_eq!(with(UpdateOptions { average: Some(0.9), ..UpdateOptions::default() }).steps(3), plain);
    assert_eq!(with(UpdateOptions { groups: vec![group(&["h.1"], 1.0)], ..UpdateOptions::default() }).steps(3), plain);
    let far = UpdateOptions { max_value: Some(1e9), ..UpdateOptions::default() };
    assert_eq!(with(far).steps(3), plain);
}

#[test]
fn an_average_follows_its_parameter() {
    let decay = 0.75f32;
    let run = with(UpdateOptions { average: Some(0.75), ..UpdateOptions::default() });
    let (mut trainer, name) = (run.trainer(), "h.0.ln_1.weight");
    let mut expected = numbers(&trainer, name);
    for _ in 0..4 {
        run.step(&mut trainer);
        for (average, parameter) in expected.iter_mut().zip(numbers(&trainer, name)) {
            *average += (1.0 - decay) * (parameter - *average);
        }
        assert_eq!(numbers(&trainer, &format!("average/{name}")), expected);
    }
    // After parameters are set, their average continues from the new values.
    trainer.set_elements(name, &vec![2.0; expected.len()]).unwrap();
    assert_eq!(numbers(&trainer, &format!("average/{name}")), vec![2.0; expected.len()]);
}

#[test]
fn groups_have_rates_and_rules_of_their_own() {
    let still = with(UpdateOptions { groups: vec![group(&["h.0", "*wpe*"], 0.0)], ..UpdateOptions::default() });
    let mut trainer = still.trainer();
    let is_still = |name: &str| name.contains("h.0.") || name.contains("wpe");
    let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
    let before: Vec<Vec<f32>> = names.iter().map(|name| numbers(&trainer, name)).collect();
    still.step(&mut trainer);
    for (name, before) in names.iter().zip(before) {
        assert_eq!(numbers(&trainer, name) == before, is_still(name), "{name}");
    }
    let mut lion = with(UpdateOptions::default());
    lion.options.step.update.groups =
        vec![ParameterGroup { optimizer: Lion::default().into(), ..group(&["h.0"], 1.0) }];
    let trainer = lion.trainer();
    assert!(trainer.tensor("exp_avg_sq/h.0.ln_1.weight").is_err());
    assert!(trainer.tensor("exp_avg_sq/h.1.ln_1.weight").is_ok());
    for (update, word) in [
        (UpdateOptions { groups: vec![group(&["h.7"], 1.0)], ..UpdateOptions::default() }, "\"h.7\""),
        (
            UpdateOptions { groups: vec![group(&["h.0"], 1.0); 257], ..UpdateOptions::default() },
            "257 are more than the maximum of 256",
        ),
        (UpdateOptions { groups: vec![group(&[], 1.0)], ..UpdateOptions::default() }, "a group has no names"),
        (UpdateOptions { groups: vec![group(&["h.0"], -1.0)], ..UpdateOptions::default() }, "learning_rate is -1"),
        (UpdateOptions { max_value: Some(0.0), ..UpdateOptions::default() }, "max_value"),
        (UpdateOptions { average: Some(1.0), ..UpdateOptions::default() }, "average"),
    ] {
        let error = with(update).try_trainer().unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn elements_of_gradients_are_cut() {
    let most = 1e-4;
    let run = with(UpdateOptions { max_value: Some(most), ..UpdateOptions::default() });
    let mut trainer = run.trainer();
    let numbers = trainer.report().parameters as f64;
    let report = run.step(&mut trainer);
    let whole = with(UpdateOptions::default());
    let norm = whole.step(&mut whole.trainer()).gradient_norm;
    assert!(
        report.gradient_norm < norm && f64::from(report.gradient_norm) <= most * numbers.sqrt(),
        "{report:?}, {norm}"
    );
}

/// The results are the same on any number of ranks, and after resuming with another number of ranks.
#[test]
fn ranks_and_resuming_change_no_bit() {
    let mut run = with(everything());
    run.kind = Kind::Gpt;
    run.options.threads = 1;
    run.options.step.micro_batches = 4;
    run.options.step.loss = LossTerms { label_smoothing: 0.1, z_loss: 1e-3 };
    let plain = run.steps(4);
    let pipeline = |ranks| {
        let mut run = run.clone();
        run.options.step.mesh = Mesh::pipeline(ranks);
        run.options.step.pipeline = Pipeline::default();
        run
    };
    assert_eq!(pipeline(2).steps_on_ranks(4), plain);
    let place = tempfile::tempdir().unwrap();
    pipeline(2).save_on_ranks(2, place.path());
    run.options.step.mesh = Mesh::default();
    let Outcome { losses, parameters, .. } = run.resume_on_ranks(place.path(), 2);
    assert_eq!((&losses[..], parameters), (&plain.losses[2..], plain.parameters));
    // Data ranks sum gradients in another order.
    let shared = TinyRun {
        options: gapless::TrainOptions {
            step: StepOptions {
                mesh: Mesh { data: 2, ..Mesh::default() },
                micro_batches: 2,
                ..run.options.step.clone()
            },
            ..run.options.clone()
        },
        ..run
    };
    for (loss, plain) in shared.steps_on_ranks(4).losses.iter().zip(&plain.losses) {
        assert!((f32::from_bits(*loss) - f32::from_bits(*plain)).abs() < 1e-4);
    }
}

/// The training loss includes its regularization terms. The evaluation loss is the likelihood alone.
#[test]
fn terms_of_the_loss_are_of_training_alone() {
    let run = |loss| {
        let mut run = TinyRun { kind: Kind::Llama, ..TinyRun::default() };
        run.options.step.loss = loss;
        let mut trainer = run.trainer();
        let (tokens, targets) = run.batch(0);
        let each = run.options.step.evaluation_batch() * run.options.step.sequence;
        let evaluated = trainer.evaluate(&tokens[..each], &targets[..each]).unwrap();
        (evaluated, run.step(&mut trainer).loss)
    };
    let (plain, with) = (run(LossTerms::NONE), run(LossTerms { label_smoothing: 0.0, z_loss: 0.1 }));
    assert_eq!(plain.0, with.0);
    assert!((plain.0 - plain.1).abs() < 1e-5, "{plain:?}");
    // The difference is 0.1 × the square of a log-sum-exp, which is near ln 50.
    assert!((1.0..2.5).contains(&(with.1 - plain.1)), "{plain:?}, {with:?}");
    let mut refused = TinyRun::default();
    refused.options.step.loss = LossTerms { label_smoothing: 1.0, z_loss: 0.0 };
    assert!(refused.try_trainer().unwrap_err().to_string().contains("label_smoothing: is 1"));
}
