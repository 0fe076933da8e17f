//! Adafactor (Shazeer & Stern, arXiv 1804.04235).

use candle_core::DType;
use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, Float, InPieces, Pieces, reduce, vectorize, with_float};
use gapless_kernels::cuda::launch::{self, AdafactorRule};

use super::{AdamW, Optimizer, ParameterInfo, ParameterUpdate, SCALARS, State};
use crate::error::{Error, Result};
use crate::nn::Init;
use crate::op::Op;
use crate::reference::{Array, Reference};
use crate::tensor::Tensor;

/// Adafactor. For a matrix [m, n], it keeps only the means of the second moment's rows and columns (section 3), which
/// are m + n elements. AdamW keeps 2mn elements. Adafactor has no first moment.
///
/// The root mean square of a step is limited (section 6), and scaled by the root mean square of the parameter (section
/// 8). So the learning rate is roughly the fraction by which a parameter changes in a step; 1e-2 is a usual value. In a
/// tensor of several experts, the weight of each expert is a matrix of its own.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Adafactor {
    /// Exponent e of the second moment's decay, which is 1 − t^−e in step t.
    pub decay_exponent: f64,
    /// Upper limit of the root mean square of a step, before the step is multiplied by the learning rate and the
    /// parameter's root mean square.
    pub clip_threshold: f64,
    /// Lower limit of the multiplier of a step. The multiplier is the parameter's root mean square if that is larger.
    pub least_scale: f64,
    /// Decoupled weight decay of matrices; vectors do not decay.
    pub weight_decay: f64,
    /// The maximum global norm of the gradients. Gradients with a larger norm are scaled down to this norm. Infinity
    /// means no clipping.
    pub max_norm: f64,
}

/// The value that is added to the square of every element of the gradient.
const EPS: f64 = 1e-30;

/// Number of columns that one task sums up.
const COLUMNS: usize = 64;

impl Default for Adafactor {
    fn default() -> Self {
        let (weight_decay, max_norm) = (0.0, f64::INFINITY);
        Self { decay_exponent: 0.8, clip_threshold: 1.0, least_scale: 1e-3, weight_decay, max_norm }
    }
}

/// The shape of a parameter as a number of matrices. A vector is one matrix with one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Matrices {
    count: usize,
    rows: usize,
    columns: usize,
}

impl Matrices {
    fn of(parameter: &ParameterInfo<'_>) -> Self {
        match parameter.dims {
            [outer @ .., rows, columns] if parameter.has_matrices() && *rows > 1 && *columns > 1 => {
                Self { count: outer.iter().product(), rows: *rows, columns: *columns }
            }
            _ => Self { count: 1, rows: 1, columns: parameter.elements() },
        }
    }

    /// True if only the row and column means of the second moment are stored.
    fn is_factored(self) -> bool {
        self.rows > 1
    }
}

impl Adafactor {
    /// Returns an AdamW with the same weight decay and clipping, which checks and applies these settings.
    fn as_adamw(&self) -> AdamW {
        let Self { weight_decay, max_norm, .. } = *self;
        AdamW { weight_decay, max_norm, ..AdamW::default() }
    }
}

impl Optimizer for Adafactor {
    fn check(&self) -> Result<()> {
        let Self { decay_exponent, clip_threshold, least_scale, .. } = *self;
        if !(decay_exponent > 0.0 && clip_threshold > 0.0 && least_scale > 0.0) {
            let why =
                format!("decay_exponent {decay_exponent}, clip_threshold {clip_threshold}, least_scale {least_scale}");
            return Err(Error::config("optimizer", why, "set each above 0; 0.8, 1 and 1e-3 are usual"));
        }
        self.as_adamw().check()
    }

    fn needs_norm(&self) -> bool {
        self.as_adamw().needs_norm()
    }

    fn states(&self, parameter: &ParameterInfo<'_>) -> Vec<State> {
        let matrices = Matrices::of(parameter);
        let state = |name, dims: Vec<usize>| State { name, spec: Spec::f32(dims), init: Init::Const(0.0).into() };
        let mut states = match (matrices.is_factored(), parameter.dims) {
            (true, [outer @ .., rows, columns]) => {
                vec![state("row_sq", [outer, &[*rows]].concat()), state("column_sq", [outer, &[*columns]].concat())]
            }
            _ => vec![state("exp_avg_sq", parameter.dims.to_vec())],
        };
        states.extend(self.as_adamw().states(parameter).into_iter().filter(|state| state.name == "master"));
        states
    }

    fn sum_dtype(&self, parameter: &ParameterInfo<'_>) -> DType {
        parameter.state_dtype()
    }

    /// A parameter is not split over data ranks, because the root mean square is taken over the whole parameter.
    fn shard_granularity(&self, _: &ParameterInfo<'_>) -> Option<usize> {
        None
    }

    fn scalars(&self, step: u64, lr: f64) -> [f32; SCALARS] {
        let mut scalars = [0.0; SCALARS];
        scalars[0] = lr as f32;
        scalars[1] = (1.0 - ((step + 1) as f64).powf(-self.decay_exponent)) as f32;
        scalars
    }

    fn update(&self, update: ParameterUpdate<'_>) -> Result<Tensor> {
        let ParameterUpdate { parameter, info, gradient, states, norm, scalars, .. } = update;
        let matrices = Matrices::of(&info);
        let moments = 1 + usize::from(matrices.is_factored());
        let op = AdafactorUpdate {
            rule: *self,
            decay: self.as_adamw().decay(&info),
            matrices,
            has_master: states.len() > moments,
        };
        let mut inputs = vec![parameter, gradient, norm, scalars];
        inputs.extend(states);
        match states.len() {
            1 => Tensor::apply_op::<2>(op, &inputs).map(|[parameter, ..]| parameter),
            2 => Tensor::apply_op::<3>(op, &inputs).map(|[parameter, ..]| parameter),
            _ => Tensor::apply_op::<4>(op, &inputs).map(|[parameter, ..]| parameter),
        }
    }
}

/// Updates in place the parameter, the second moment (row and column means for matrices) and, if there is one, the f32
/// master. The inputs are (parameter, gradient, norm, scalars), followed by the second moment and the master. If there
/// is a master, the parameter becomes the rounded master. If the norm is not finite, nothing is updated.
///
/// ```text
/// s ← clipped gradient² + ε                     R ← βR + (1 − β) mean of each row of s    C ← the same of columns
/// u ← clipped gradient ÷ √(R ⊗ C ÷ mean of R)    u ← u ÷ max(1, rms(u) ÷ clip_threshold)
/// p ← p − rate · (max(least_scale, rms(p)) · u + decay · p)
/// ```
#[derive(Debug, Clone, Copy)]
struct AdafactorUpdate {
    rule: Adafactor,
    decay: f64,
    matrices: Matrices,
    has_master: bool,
}

impl AdafactorUpdate {
    /// Runs the kernel for parameters and gradients stored in these types.
    fn run_on<P: Float, G: Float>(&self, args: &mut Args<'_>) {
        let Matrices { rows, columns, .. } = self.matrices;
        let (p, g) = (args.output::<P>(0), args.input::<G>(1));
        let (norm, scalars) = (args.input::<f32>(2)[0], args.input::<f32>(3));
        if !norm.is_finite() {
            return;
        }
        let is_factored = self.matrices.is_factored();
        let mut moments = [args.output::<f32>(1), if is_factored { args.output::<f32>(2) } else { &mut [] }];
        let mut master = self.has_master.then(|| args.output::<f32>(2 + usize::from(is_factored)));
        let sums = args.workspace().take::<f32>();
        let step = UpdateSizes {
            clip: (self.rule.max_norm as f32 / (norm + 1e-6)).min(1.0),
            beta: scalars[1],
            rate: scalars[0],
            decay: self.decay as f32,
            threshold: self.rule.clip_threshold as f32,
            least: self.rule.least_scale as f32,
        };
        let size = rows * columns;
        let [first, second] = &mut moments;
        for (index, (p, g)) in p.chunks_exact_mut(size).zip(g.chunks_exact(size)).enumerate() {
            let master = master.as_mut().map(|master| &mut master[index * size..][..size]);
            if is_factored {
                let (of_rows, of_columns) =
                    (&mut first[index * rows..][..rows], &mut second[index * columns..][..columns]);
                step.factored(p, master, g, of_rows, of_columns, sums);
            } else {
                step.whole(p, master, g, first, sums);
            }
        }
    }
}

/// The values that one step applies to every element.
#[derive(Clone, Copy)]
struct UpdateSizes {
    clip: f32,
    beta: f32,
    rate: f32,
    decay: f32,
    threshold: f32,
    least: f32,
}

impl UpdateSizes {
    /// Returns the new moment β·before + (1 − β)·mean.
    #[inline(always)]
    fn moment(&self, before: f32, mean: f32) -> f32 {
        self.beta * before + (1.0 - self.beta) * mean
    }

    #[inline(always)]
    fn square<G: Float>(&self, g: G) -> f32 {
        let g = g.load() * self.clip;
        g * g + EPS as f32
    }

    /// Returns the factor by which the direction is multiplied in the update. The arguments are the mean squares of the
    /// direction and of the parameter.
    fn far(&self, direction: f32, parameter: f32) -> f32 {
        self.rate * parameter.sqrt().max(self.least) / (direction.sqrt() / self.threshold).max(1.0)
    }

    /// Updates a matrix. `sums` is scratch of two elements per row.
    fn factored<P: Float, G: Float>(
        &self,
        p: &mut [P],
        master: Option<&mut [f32]>,
        g: &[G],
        of_rows: &mut [f32],
        of_columns: &mut [f32],
        sums: &mut [f32],
    ) {
        let (rows, columns) = (of_rows.len(), of_columns.len());
        of_rows.pieces_mut(1).zip(g.pieces(columns)).for_each(|(moment, g)| {
            let sum = vectorize!(reduce::sum(g, |g| {
                let g = g * self.clip;
                g * g + EPS as f32
            }));
            moment[0] = self.moment(moment[0], sum / columns as f32);
        });
        of_columns.pieces_mut(COLUMNS).enumerate().for_each(|(task, moments)| {
            let first = task * COLUMNS;
            let mut sums = [0.0; COLUMNS];
            for row in g.chunks_exact(columns) {
                for (sum, g) in sums.iter_mut().zip(&row[first..][..moments.len()]) {
                    *sum += self.square(*g);
                }
            }
            for (moment, sum) in moments.iter_mut().zip(sums) {
                *moment = self.moment(*moment, sum / rows as f32);
            }
        });
        let mean = of_rows.iter().sum::<f32>() / rows as f32;
        let (of_rows, of_columns) = (&*of_rows, &*of_columns);
        // Divides by the two square roots one after the other, because the product of a row mean and a column mean may
        // leave the range of f32.
        let direction = |row: usize, column: usize, g: f32| {
            g * self.clip / (of_rows[row] / mean).sqrt() / of_columns[column].sqrt()
        };
        self.apply(p, master, g, columns, sums, &direction);
    }

    /// Updates a vector, whose second moment is stored in full. `sums` is scratch of two elements, because a vector has
    /// one row.
    fn whole<P: Float, G: Float>(
        &self,
        p: &mut [P],
        master: Option<&mut [f32]>,
        g: &[G],
        moments: &mut [f32],
        sums: &mut [f32],
    ) {
        for (moment, g) in moments.iter_mut().zip(g) {
            *moment = self.moment(*moment, self.square(*g));
        }
        let moments = &*moments;
        self.apply(p, master, g, moments.len(), sums, &|_, column, g| g * self.clip / moments[column].sqrt());
    }

    /// Moves the parameter along a direction. [`AdafactorUpdate`] describes how the direction is limited and scaled.
    fn apply<P: Float, G: Float>(
        &self,
        p: &mut [P],
        master: Option<&mut [f32]>,
        g: &[G],
        columns: usize,
        sums: &mut [f32],
        direction: &(impl Fn(usize, usize, f32) -> f32 + Sync),
    ) {
        let rows = p.len() / columns;
        let (of_u, of_p) = sums[..2 * rows].split_at_mut(rows);
        let before = |row: usize, p: &[P]| match &master {
            Some(master) => reduce::sum(&master[row * columns..][..columns], |x| x * x),
            None => reduce::sum(p, |x| x * x),
        };
        let pieces = of_u.pieces_mut(1).zip(of_p.pieces_mut(1)).zip((*p).pieces(columns).zip(g.pieces(columns)));
        pieces.enumerate().for_each(|(row, ((u, x), (p, g)))| {
            vectorize!({
                let mut sum = 0.0;
                for (column, g) in g.iter().enumerate() {
                    let u = direction(row, column, g.load());
                    sum += u * u;
                }
                (u[0], x[0]) = (sum, before(row, p));
            });
        });
        let size = (rows * columns) as f32;
        let (of_u, of_p) = (of_u.iter().sum::<f32>() / size, of_p.iter().sum::<f32>() / size);
        let (far, left) = (self.far(of_u, of_p), 1.0 - self.rate * self.decay);
        match master {
            Some(master) => {
                let pieces = p.pieces_mut(columns).zip(master.pieces_mut(columns)).zip(g.pieces(columns));
                pieces.enumerate().for_each(|(row, ((p, master), g))| {
                    for (column, ((p, master), g)) in p.iter_mut().zip(master).zip(g).enumerate() {
                        *master = *master * left - far * direction(row, column, g.load());
                        *p = P::store(*master);
                    }
                });
            }
            None => p.pieces_mut(columns).zip(g.pieces(columns)).enumerate().for_each(|(row, (p, g))| {
                for (column, (p, g)) in p.iter_mut().zip(g).enumerate() {
                    *p = P::store(p.load() * left - far * direction(row, column, g.load()));
                }
            }),
        }
    }
}

impl Op for AdafactorUpdate {
    fn name(&self) -> &'static str {
        "adafactor"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let [parameter, gradient, _, _, states @ ..] = inputs else {
            return Err("it must have 4 inputs and the states".into());
        };
        if parameter.dims() != gradient.dims() || states.iter().any(|state| state.dtype != DType::F32) {
            return Err("the gradient must have the parameter's shape, and states must be f32".into());
        }
        Ok([parameter].into_iter().chain(states).cloned().collect())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        20 * inputs[0].elements() as u64
    }

    fn mutates(&self) -> &[(usize, usize)] {
        let states = 1 + usize::from(self.matrices.is_factored()) + usize::from(self.has_master);
        &[(0, 0), (4, 1), (5, 2), (6, 3)][..1 + states]
    }

    fn workspace(&self, _: &[Spec], _: &[Spec], _: usize) -> Vec<u64> {
        vec![8 * self.matrices.rows as u64]
    }

    fn runs_in_bf16(&self) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        with_float!(args.output_dtype(0), P => with_float!(args.input_dtype(1), G => self.run_on::<P, G>(args)));
    }

    fn cuda_workspace(&self, _: &[Spec], _: &[Spec]) -> Vec<u64> {
        launch::adafactor_workspace(self.matrices.count, self.matrices.rows)
    }

    /// The means, the sizes of the step and the step read the gradient again, and the step reads the parameter again.
    fn cuda_bytes_again(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        let reads = if self.matrices.is_factored() { 3 } else { 1 };
        let parameter = if self.has_master { &inputs[inputs.len() - 1] } else { &inputs[0] };
        reads * inputs[1].bytes() + parameter.bytes()
    }

    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        let Matrices { count, rows, columns } = self.matrices;
        let Adafactor { clip_threshold, least_scale, max_norm, .. } = self.rule;
        let rule = AdafactorRule {
            max_norm: max_norm as f32,
            clip_threshold: clip_threshold as f32,
            least_scale: least_scale as f32,
            decay: self.decay as f32,
            matrices: count,
            rows,
            columns,
        };
        launch::adafactor(&rule, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let Matrices { count, rows, columns } = self.matrices;
        let (norm, rate, beta) = (args.input(2).data[0], args.input(3).data[0], args.input(3).data[1]);
        let clip = (self.rule.max_norm / (norm + 1e-6)).min(1.0);
        let g = args.input(1).map(|g| g * clip);
        let moments = 1 + usize::from(self.matrices.is_factored());
        let from = if self.has_master { args.input(4 + moments) } else { args.input(0) };
        let (mut next, size) = (from.clone(), rows * columns);
        let mut states: Vec<Array> = (0..moments).map(|index| args.input(4 + index).clone()).collect();
        let square = |g: f64| g * g + EPS;
        let mean = |x: &mut dyn Iterator<Item = f64>| {
            let (sum, count) = x.fold((0.0, 0), |(sum, count), x| (sum + x, count + 1));
            sum / f64::from(count)
        };
        for matrix in 0..count {
            let g = &g.data[matrix * size..][..size];
            let u: Vec<f64> = if self.matrices.is_factored() {
                for row in 0..rows {
                    let of_row = mean(&mut g[row * columns..][..columns].iter().map(|&g| square(g)));
                    let state = &mut states[0].data[matrix * rows + row];
                    *state = beta * *state + (1.0 - beta) * of_row;
                }
                for column in 0..columns {
                    let of_column = mean(&mut (0..rows).map(|row| square(g[row * columns + column])));
                    let state = &mut states[1].data[matrix * columns + column];
                    *state = beta * *state + (1.0 - beta) * of_column;
                }
                let of_rows = &states[0].data[matrix * rows..][..rows];
                let of_all = mean(&mut of_rows.iter().copied());
                let of_columns = &states[1].data[matrix * columns..][..columns];
                (0..size).map(|i| g[i] / (of_rows[i / columns] / of_all * of_columns[i % columns]).sqrt()).collect()
            } else {
                let of_all = states[0].data.iter_mut().zip(g);
                of_all.for_each(|(state, &g)| *state = beta * *state + (1.0 - beta) * square(g));
                g.iter().zip(&states[0].data).map(|(g, state)| g / state.sqrt()).collect()
            };
            let root_mean_square = |x: &[f64]| mean(&mut x.iter().map(|x| x * x)).sqrt();
            let p = &mut next.data[matrix * size..][..size];
            let far = rate * root_mean_square(p).max(self.rule.least_scale)
                / (root_mean_square(&u) / self.rule.clip_threshold).max(1.0);
            p.iter_mut().zip(u).for_each(|(p, u)| *p = *p * (1.0 - rate * self.decay) - far * u);
        }
        let copy = self.has_master.then(|| next.clone());
        [next].into_iter().chain(states).chain(copy).collect()
    }
}
