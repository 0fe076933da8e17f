//! Operations on caches, compared with their f64 references. These operations have no gradients.

use gapless_compile::Output;
use gapless_graph::ops::{Attention, CacheWrite, CachedAttention};
use gapless_graph::reference::evaluate;
use gapless_graph::{Result, Sequences, Stream, Tensor, lock};
use gapless_runtime::RunOptions;

use crate::DType;
use crate::gradient_check::{Recorded, session};

/// The tolerance relative to the largest element, a multiple of the f32 rounding error of 2⁻²⁴ = 6e-8.
const KERNEL: f64 = 1e-5;

fn check(shapes: &[&[usize]], positions: (&[usize], &[u32]), f: impl Fn(&[Tensor], &Tensor) -> Result<Tensor>) {
    let recorded = Recorded::new(DType::F32, shapes, &[positions], |x, ids| f(x, &ids[0])).unwrap();
    let graph = lock(&recorded.graph);
    let exact = evaluate(&graph, &recorded.given, Stream::new(1, 1, 0));
    let mut session = session(&graph, &[Output::local("y", recorded.y.id())]).unwrap();
    let program = session.executable().program("check").unwrap();
    for (name, array) in &recorded.given {
        if name.starts_with('x') {
            session.write_tensor(name, &array.data.iter().map(|&x| x as f32).collect::<Vec<f32>>()).unwrap();
        } else if name.starts_with("ids") {
            let ids: Vec<u32> = array.data.iter().map(|&x| x as u32).collect();
            session.write_input(program, name, 0, &ids).unwrap();
        }
    }
    session.run(program, RunOptions { poison: true, ..RunOptions::default() }).unwrap();
    let expected = &exact[recorded.y.id().index()].data;
    let found = session.with_output(program, "y", |y: &[f32]| y.to_vec()).unwrap();
    assert_eq!(found.len(), expected.len());
    let most = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    for (found, expected) in found.iter().zip(expected) {
        assert!((f64::from(*found) - expected).abs() <= KERNEL * most, "{found} is not {expected}");
    }
}

#[test]
fn kernels_agree_with_their_references() {
    // A chunk and a single token of sequences at different positions. The single token is a strided view.
    let write = |x: &[Tensor], positions: &Tensor| Tensor::apply_op(CacheWrite, &[&x[0], &x[1], positions]);
    check(&[&[2, 3, 7, 4], &[2, 3, 2, 4]], (&[2, 2], &[0, 1, 5, 6]), |x, p| write(x, p).map(|[y]| y));
    check(&[&[2, 3, 7, 4], &[2, 1, 3, 4]], (&[2, 1], &[6, 2]), |x, p| {
        write(&[x[0].clone(), x[1].transpose(1, 2)?], p).map(|[y]| y)
    });
    // Grouped heads, and more keys than a kernel packs at once.
    let attend = |x: &[Tensor], p: &Tensor| {
        Tensor::apply_op(CachedAttention(Attention::causal(0.3)), &[&x[0], &x[1], &x[2], p]).map(|[y]| y)
    };
    check(&[&[2, 4, 3, 8], &[2, 2, 9, 8], &[2, 2, 9, 8]], (&[2, 3], &[6, 7, 8, 0, 1, 2]), attend);
    check(&[&[2, 4, 1, 8], &[2, 4, 900, 8], &[2, 4, 900, 8]], (&[2, 1], &[899, 0]), attend);
    check(&[&[2, 1, 4, 8], &[2, 2, 5, 8], &[2, 2, 5, 8]], (&[2, 1], &[3, 4]), |x, p| {
        attend(&[x[0].transpose(1, 2)?, x[1].clone(), x[2].clone()], p)
    });
    // Keys and values are views of a wider tensor, and all heads share a part of each key.
    check(&[&[2, 4, 3, 8], &[2, 9, 4, 13], &[2, 1, 9, 3]], (&[2, 3], &[6, 7, 8, 0, 1, 2]), |x, p| {
        let of_heads = x[1].transpose(1, 2)?;
        let k = Tensor::cat(&[&of_heads.narrow(3, 0, 5)?, &x[2].broadcast_as((2, 4, 9, 3))?], 3)?;
        attend(&[x[0].clone(), k, of_heads.narrow(3, 5, 8)?], p)
    });
    // A window over the last keys, capped scores, and values of another size than keys.
    let windowed = |x: &[Tensor], p: &Tensor| {
        let how = Attention { window: Some(5), cap: Some(0.7), ..Attention::causal(0.3) };
        Tensor::apply_op(CachedAttention(how), &[&x[0], &x[1], &x[2], p]).map(|[y]| y)
    };
    check(&[&[2, 4, 3, 8], &[2, 2, 9, 8], &[2, 2, 9, 3]], (&[2, 3], &[6, 7, 8, 0, 1, 2]), windowed);
    check(&[&[1, 2, 1, 8], &[1, 2, 900, 8], &[1, 2, 900, 13]], (&[1, 1], &[899]), windowed);
    // Chunks, of which a query sees its own.
    let chunked = |x: &[Tensor], p: &Tensor| {
        let how = Attention { chunk: Some(4), ..Attention::causal(0.3) };
        Tensor::apply_op(CachedAttention(how), &[&x[0], &x[1], &x[2], p]).map(|[y]| y)
    };
    check(&[&[2, 4, 3, 8], &[2, 2, 9, 8], &[2, 2, 9, 8]], (&[2, 3], &[6, 7, 8, 2, 3, 4]), chunked);
    // A sink for each head.
    check(&[&[2, 4, 3, 8], &[2, 2, 9, 8], &[2, 2, 9, 3], &[4]], (&[2, 3], &[6, 7, 8, 0, 1, 2]), |x, p| {
        Tensor::apply_op(CachedAttention(Attention::causal(0.3)), &[&x[0], &x[1], &x[2], p, &x[3]]).map(|[y]| y)
    });
    // Rotation by given positions.
    check(&[&[2, 3, 2, 8]], (&[2, 2], &[0, 1, 40, 41]), |x, positions| {
        let [cache] = Tensor::apply_op(
            gapless_graph::ops::Rope {
                frequencies: gapless_graph::ops::RopeScaling::None.frequencies(100.0),
                neighbours: false,
                inverse: false,
            },
            &[&x[0].transpose(1, 2)?, positions],
        )?;
        Ok(cache)
    });
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let refused = |window: usize, heads: usize| {
        Recorded::new(DType::F32, &[&[1, heads, 3, 8], &[1, 2, 3, 8]], &[(&[1, 3], &[0, 1, 2])], |x, ids| {
            let graph = x[0].graph();
            lock(graph).set_sequences(Sequences::Continued { positions: ids[0].id(), window });
            x[0].causal_attention(&x[1], &x[1], 0.3)
        })
        .map(|_| ())
    };
    refused(3, 4).unwrap();
    assert!(refused(2, 4).unwrap_err().to_string().contains("window"));
    assert!(refused(3, 3).unwrap_err().to_string().contains("multiple"));
}
