//! Steps of mixture-of-experts models, and ways to route their tokens, for tests and benches.
//!
//! A [`MoeStep`] is one rank of a pipeline with expert parallelism. It runs 1F1B, and every layer has attention (static
//! buffers) and experts (requests). A [`Routing`] gives the rows that the rank receives in each layer and micro-batch.

#![allow(dead_code, reason = "not every test uses all of it")]

use gapless_alloc::arena::Request;
use gapless_alloc::{Buffer, Error, Label, Lifetime, Problem, Role};

/// A pipeline stage's part of a training step of a model with experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeStep {
    /// Layers on this rank.
    pub layers: u64,
    /// Micro-batches of the step.
    pub micro_batches: u64,
    /// Forwards that run ahead of the first backward.
    pub ahead: u64,
    /// Tokens of a micro-batch on each rank.
    pub tokens: u64,
    /// Width of the model.
    pub hidden: u64,
    /// Width of one expert.
    pub inner: u64,
    /// Experts of a layer, over all ranks.
    pub experts: u64,
    /// Experts that each token chooses.
    pub top_k: u64,
    /// Ranks that share the experts.
    pub ranks: u64,
    /// Vocabulary of the head that ends each forward; 0 for no head.
    pub vocabulary: u64,
}

impl MoeStep {
    /// Four layers of Mixtral 8x7B (arXiv 2401.04088, table 1) on the first of four stages, with one expert per rank.
    pub fn mixtral() -> Self {
        Self {
            layers: 4,
            micro_batches: 12,
            ahead: 4,
            tokens: 4096,
            hidden: 4096,
            inner: 14336,
            experts: 8,
            top_k: 2,
            ranks: 8,
            vocabulary: 0,
        }
    }

    /// Six layers of Qwen1.5-MoE-A2.7B and its head, on one of four ranks. The model has 60 fine-grained experts of width
    /// 1408, four per token.
    pub fn qwen() -> Self {
        Self {
            layers: 6,
            micro_batches: 8,
            ahead: 1,
            tokens: 4096,
            hidden: 2048,
            inner: 1408,
            experts: 60,
            top_k: 4,
            ranks: 4,
            vocabulary: 151_936,
        }
    }

    /// Rows that a rank receives if all ranks receive the same number.
    pub fn balanced_rows(&self) -> u64 {
        self.tokens * self.top_k
    }

    /// The most rows that a rank can receive. For this, every token of every rank chooses as many experts of this rank
    /// as possible.
    pub fn most_rows(&self) -> u64 {
        self.ranks * self.tokens * self.top_k.min(self.experts / self.ranks)
    }

    /// The buffers and requests of the step, with lifetimes in ticks.
    ///
    /// # Errors
    /// Returns an error only if sizes exceed `u64`, as [`Problem::new`] does.
    pub fn build(self) -> Result<BuiltStep, Error> {
        let mut build = Build { step: self, now: 0, fixed: Vec::new(), requests: Vec::new(), phases: Vec::new() };
        let mut saved: Vec<Vec<Saved>> = (0..self.micro_batches).map(|_| Vec::new()).collect();
        for m in 0..self.micro_batches + self.ahead {
            if m < self.micro_batches {
                build.phases.push(build.now);
                saved[m as usize] = (0..self.layers).map(|layer| build.forward(layer, m)).collect();
                build.head();
            }
            if let Some(m) = m.checked_sub(self.ahead) {
                build.phases.push(build.now);
                while let Some(layer) = saved[m as usize].pop() {
                    build.backward(layer, m);
                }
            }
        }
        let Build { fixed, mut requests, phases, .. } = build;
        requests.sort_by_key(|(request, _)| request.ticks.start);
        let (requests, origins) = requests.into_iter().unzip();
        Ok(BuiltStep { step: self, fixed: Problem::new(fixed)?, requests, origins, phases })
    }
}

/// A [`MoeStep`] with lifetimes in ticks.
#[derive(Debug, Clone)]
pub struct BuiltStep {
    /// The step that was built.
    pub step: MoeStep,
    /// Buffers of static size.
    pub fixed: Problem,
    /// Buffers whose size depends on the routing.
    pub requests: Vec<Request>,
    /// Layer and micro-batch of each request.
    pub origins: Vec<(u64, u64)>,
    /// Ticks at which a forward or backward pass begins.
    pub phases: Vec<u64>,
}

impl BuiltStep {
    /// The size of each request under `routing`, in repetition `round`.
    pub fn bytes(&self, routing: Routing, round: u64) -> Vec<u64> {
        let rows = |&(layer, m): &(u64, u64)| routing.rows(&self.step, layer, m, round);
        self.requests.iter().zip(&self.origins).map(|(r, origin)| r.bytes_per_row * rows(origin)).collect()
    }
}

/// Buffers that a layer's forward keeps for its backward, with their first ticks and sizes.
struct Saved {
    layer: u64,
    fixed: Vec<(u64, u64)>,
    /// First ticks, and bytes per row.
    rows: Vec<(u64, u64)>,
}

struct Build {
    step: MoeStep,
    now: u64,
    fixed: Vec<Buffer>,
    requests: Vec<(Request, (u64, u64))>,
    phases: Vec<u64>,
}

impl Build {
    /// Advances to the next instruction and returns its first tick.
    fn instruction(&mut self) -> u64 {
        self.now += 2;
        self.now - 2
    }

    fn fixed(&mut self, ticks: Lifetime, bytes: u64) {
        self.fixed.push(Buffer::new(ticks, bytes).aligned(512));
    }

    fn rows(&mut self, ticks: Lifetime, per_row: u64, layer: u64, m: u64, op: &str) {
        let tensor = format!("h.{layer}.experts.{op}#{m}");
        let label = Label { tensor, op: op.into(), layer: format!("h.{layer}"), role: Role::Routing };
        let (balanced, most) = (self.step.balanced_rows() * per_row, self.step.most_rows() * per_row);
        let request = Request::new(ticks, balanced, most).aligned(512).in_rows(per_row).labelled(label);
        self.requests.push((request, (layer, m)));
    }

    fn forward(&mut self, layer: u64, m: u64) -> Saved {
        let MoeStep { tokens, hidden, inner, .. } = self.step;
        let token_rows = 2 * tokens * hidden;
        let mut fixed = Vec::new();
        // Norm, queries, keys and values, attention, projection, residual. Each reads the result of the operation
        // before.
        for bytes in [token_rows, 3 * token_rows, token_rows, token_rows, 2 * token_rows, token_rows] {
            let at = self.instruction();
            fixed.push((at + 1, bytes));
            self.fixed(at..at + 2, token_rows / 2);
        }
        // Dispatch sends sorted rows. Then come gate, up, product and down, and combine adds up the returned rows.
        let at = self.instruction();
        self.fixed(at + 1..at + 5, self.step.top_k * token_rows);
        let mut rows = vec![(self.instruction() + 1, 2 * hidden)];
        for _ in 0..3 {
            rows.push((self.instruction() + 1, 2 * inner));
        }
        let down = self.instruction();
        self.rows(down + 1..down + 3, 2 * hidden, layer, m, "down");
        let combine = self.instruction();
        self.fixed(combine + 1..combine + 4, self.step.top_k * token_rows);
        let at = self.instruction();
        fixed.push((at + 1, token_rows));
        Saved { layer, fixed, rows }
    }

    fn head(&mut self) {
        if self.step.vocabulary > 0 {
            let at = self.instruction();
            let logits = 2 * self.step.tokens * self.step.vocabulary;
            self.fixed(at + 1..at + 4, logits);
            self.fixed(at + 3..at + 6, logits);
            self.instruction();
            self.instruction();
        }
    }

    fn backward(&mut self, saved: Saved, m: u64) {
        let MoeStep { tokens, hidden, inner, .. } = self.step;
        let layer = saved.layer;
        let token_rows = 2 * tokens * hidden;
        let receive = self.instruction();
        self.fixed(receive..receive + 2, self.step.top_k * token_rows);
        self.rows(receive + 1..receive + 4, 2 * hidden, layer, m, "d_down");
        // The gradient of the product comes first, then those of gate and up, then that of the received rows.
        let product = self.instruction();
        self.rows(product + 1..product + 4, 2 * inner, layer, m, "d_product");
        let gates = self.instruction();
        self.rows(gates + 1..gates + 4, 2 * inner, layer, m, "d_gate");
        self.rows(gates + 1..gates + 4, 2 * inner, layer, m, "d_up");
        let received = self.instruction();
        self.rows(received + 1..received + 3, 2 * hidden, layer, m, "d_received");
        let ends = [received + 1, gates + 2, gates + 2, product + 2];
        for ((&(birth, per_row), end), op) in saved.rows.iter().zip(ends).zip(["received", "gate", "up", "product"]) {
            self.rows(birth..end, per_row, layer, m, op);
        }
        let send = self.instruction();
        self.fixed(send + 1..send + 4, self.step.top_k * token_rows);
        for (birth, bytes) in saved.fixed.into_iter().rev() {
            let at = self.instruction();
            self.fixed(at + 1..at + 4, bytes);
            self.fixed(birth..at + 2, bytes);
        }
    }
}

/// The distribution of rows over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Routing {
    /// All experts are equally likely. This rank gets up to 5 % more or fewer rows than the average.
    Uniform,
    /// The n-th most popular expert is chosen n^−0.6 as often as the first. The ranking changes with layer and
    /// micro-batch.
    Zipf,
    /// Every token chooses the same expert of this rank first, and its other experts uniformly.
    OneExpert,
    /// Twice the balanced rows, and nearly no rows, in turns.
    Oscillating,
    /// Any number of rows from none to the bound.
    Anything,
}

impl Routing {
    /// All routings.
    pub const ALL: [Self; 5] = [Self::Uniform, Self::Zipf, Self::OneExpert, Self::Oscillating, Self::Anything];

    /// Rows that the rank receives for one layer and micro-batch, in repetition `round`.
    pub fn rows(self, step: &MoeStep, layer: u64, micro_batch: u64, round: u64) -> u64 {
        let (balanced, most) = (step.balanced_rows(), step.most_rows());
        let mut random = Random(layer << 40 ^ micro_batch << 20 ^ round);
        let rows = match self {
            Self::Uniform => balanced * (950 + random.below(101)) / 1000,
            Self::Zipf => {
                let weight = |rank: u64| ((rank + 1) as f64).powf(-0.6);
                let mut ranking: Vec<u64> = (0..step.experts).collect();
                for left in (1..ranking.len()).rev() {
                    ranking.swap(left, random.below(left as u64 + 1) as usize);
                }
                let here: f64 = ranking.iter().take((step.experts / step.ranks) as usize).map(|&r| weight(r)).sum();
                let all: f64 = (0..step.experts).map(weight).sum();
                (here / all * (balanced * step.ranks) as f64) as u64
            }
            Self::OneExpert => {
                let others = balanced * step.ranks - step.tokens * step.ranks;
                let here = (step.experts / step.ranks - 1) as f64 / (step.experts - 1) as f64;
                step.tokens * step.ranks + (others as f64 * here) as u64
            }
            Self::Oscillating if (layer + micro_batch + round).is_multiple_of(2) => 2 * balanced,
            Self::Oscillating => random.below(balanced / 64),
            Self::Anything => random.below(most + 1),
        };
        rows.min(most)
    }
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % limit.max(1)
    }
}
