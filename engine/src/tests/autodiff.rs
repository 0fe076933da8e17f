//! Tests that gradients have the types that are requested for them.

use gapless_graph::autodiff::{ParameterGradient, differentiate_in};
use gapless_graph::{DType, ValueId, lock};

use crate::gradient_check::Recorded;

/// A weight is the sum of two parameters, so both parameters have the weight's gradient. Each parameter gets this
/// gradient in the type that is requested for it, directly or by a cast.
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
        // The inputs and outputs of every node have the types that the node's shape rule expects.
        for node in graph.nodes() {
            let specs = node.op.infer(&graph.specs(&node.inputs)).unwrap();
            assert_eq!(specs, graph.specs(&node.outputs), "{:?}", node.op);
        }
    }
}
