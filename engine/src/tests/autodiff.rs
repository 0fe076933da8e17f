//! Gradients in the types that are asked for.

use gapless_graph::autodiff::{ParameterGradient, differentiate_in};
use gapless_graph::{DType, ValueId, lock};

use crate::gradient_check::Recorded;

/// Both parts of a weight that is a sum have the weight's gradient, each in the type that it is asked for in: made so, or
/// changed.
#[test]
fn gradients_are_in_the_types_that_are_asked_for() {
    for types in [
        [DType::F32; 3],
        [DType::BF16; 3],
        [DType::BF16, DType::F32, DType::BF16],
        [DType::F32, DType::BF16, DType::F32],
    ] {
        let Recorded { graph, loss, .. } =
            Recorded::new(DType::BF16, &[&[4, 3], &[5, 3], &[5, 3]], &[], |x, _| x[0].linear(&x[1].add(&x[2])?, None))
                .unwrap();
        let parameters: Vec<ValueId> = lock(&graph).persistent().map(|(id, _)| id).collect();
        let number = |id: ValueId| parameters.iter().position(|&parameter| parameter == id).unwrap();
        let gradients = differentiate_in(&graph, &loss, 1.0, &|parameter| types[number(parameter.id())]).unwrap();
        let graph = lock(&graph);
        for ParameterGradient { parameter, summands } in gradients {
            let got = summands.iter().map(|&summand| graph.value(summand).spec.dtype);
            assert!(got.eq([types[number(parameter)]]), "{parameter:?} of {types:?}");
        }
        // Nothing reads what is of another type than its own rule has it.
        for node in graph.nodes() {
            let specs = node.op.infer(&graph.specs(&node.inputs)).unwrap();
            assert_eq!(specs, graph.specs(&node.outputs), "{:?}", node.op);
        }
    }
}
