//! Comparison of a step with its reference.

use candle_core::{DType, Device, Tensor};
use gapless::{StepReport, Trainer};

use crate::candle::{Reference, ids};
use crate::mixtures::{LOAD_BIAS, expect_choices};
use crate::{BATCH, Result};

pub const TOLERANCE: f64 = 1e-5;

/// ‖a − b‖ ÷ ‖b‖.
pub fn relative_error(a: &Tensor, b: &Tensor) -> Result<f64> {
    Ok(norm(&(a.to_dtype(DType::F64)? - b)?)? / norm(b)?)
}

pub fn norm(x: &Tensor) -> Result<f64> {
    Ok(x.sqr()?.sum_all()?.to_scalar::<f64>()?.sqrt())
}

/// Collects all deviations of a run, so that they can be reported together.
#[derive(Default)]
pub struct Verdict {
    violations: Vec<String>,
    worst: f64,
}

impl Verdict {
    pub fn expect(&mut self, error: f64, tolerance: f64, what: impl std::fmt::Display) {
        self.worst = self.worst.max(error);
        let fits = error <= tolerance; // a NaN does not
        if !fits {
            self.violations.push(format!("{what}: relative error {error:.2e}, allowed is {tolerance:.0e}"));
        }
    }

    /// Compares the loss, the gradients and their norm with those of the reference before the step.
    pub fn expect_step(
        &mut self,
        trainer: &Trainer,
        report: StepReport,
        twin: &Reference,
        (tokens, targets): (&[u32], &[u32]),
        place: &str,
    ) -> Result {
        let (tokens, targets) = (ids(tokens, BATCH)?, ids(targets, BATCH)?);
        let choices = expect_choices(twin, trainer, &tokens, place)?;
        let (loss, gradients) = twin.backward(&tokens, &targets)?;
        let loss = loss.to_scalar::<f64>()?;
        self.expect((f64::from(report.loss) - loss).abs() / loss, 1e-6, format!("loss of {place}"));
        let variables = twin.variables();
        assert_eq!(variables.len(), trainer.parameter_names().count(), "the twin has the same parameters");
        let mut squares = 0.0;
        for (name, variable) in variables {
            let gradient = trainer.gradient(&name)?;
            if let Some(gate) = name.strip_suffix(LOAD_BIAS) {
                assert!(gradients.get(&variable).is_none(), "{name} is for choosing alone");
                let (_, choice) = choices.iter().find(|choice| choice.0 == gate).expect("every gate chooses");
                let load = Tensor::new(choice.load.as_slice(), &Device::Cpu)?;
                self.expect(relative_error(&gradient, &load)?, 0.0, format!("load for {name} of {place}"));
                continue;
            }
            let expected = gradients.get(&variable).expect("every other variable has a gradient");
            self.expect(relative_error(&gradient, expected)?, TOLERANCE, format!("gradient of {name} of {place}"));
            squares += norm(expected)?.powi(2);
        }
        let error = (f64::from(report.gradient_norm) / squares.sqrt() - 1.0).abs();
        self.expect(error, TOLERANCE, format!("gradient norm of {place}"));
        Ok(())
    }

    pub fn finish(self, what: &str) {
        println!("{what}: worst relative error {:.2e}", self.worst);
        assert!(self.violations.is_empty(), "\n{}", self.violations.join("\n"));
    }
}
