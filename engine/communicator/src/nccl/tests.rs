//! Ranks that are GPUs. On a machine with a GPU, the operations of a single rank are checked. On any other machine, the
//! errors are checked.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};

use super::*;
use crate::launch_order::Call;
use crate::{Collective, InProcess, Memory, on_threads};

const LEN: usize = 1 << 20;

fn alone() -> Box<dyn Communicator> {
    Box::new(InProcess::world(1).remove(0))
}

/// On a machine with a GPU, checks the operations of a rank. On any other machine, checks the error.
#[test]
fn a_machine_has_a_gpu_or_the_error_says_what_is_missing_and_what_to_do() {
    match Nccl::on_device(alone(), 0) {
        Ok(rank) => one_rank(rank),
        Err(CommunicatorError::Missing { libraries }) => {
            let text = CommunicatorError::Missing { libraries: libraries.clone() }.to_string();
            gapless_testing::not_checked(&text);
            assert!(text.starts_with("ranks on GPUs cannot run here: there is no "), "{text}");
            for library in libraries {
                assert!(!library.tried.is_empty() && !library.remedy.is_empty(), "{text}");
                let names = match library.what {
                    "NVIDIA driver" => vec!["libcuda.so", "libcuda.so.1"],
                    "NCCL" => {
                        std::env::var("GAPLESS_NCCL_LIBRARY").map_or(vec!["libnccl.so.2", "libnccl.so"], |_| vec![])
                    }
                    what => panic!("{what}"),
                };
                for name in names {
                    assert!(library.tried.iter().any(|(tried, _)| tried == name), "{name}: {text}");
                }
                assert!(text.contains(library.remedy));
            }
        }
        Err(error) => panic!("there are driver and NCCL, but {error}"),
    }
}

/// Ranks that cannot have a GPU return, each with its own error. No rank waits for another.
#[test]
fn all_ranks_hear_of_it() {
    let texts = on_threads(3, |world| match Nccl::on_device(world, 0) {
        Ok(_) => Ok::<_, CommunicatorError>("a GPU".to_owned()),
        Err(error) => Ok(error.to_string()),
    });
    // On a machine with one GPU, three ranks are refused too.
    assert!(texts.unwrap().iter().all(|text| text != "a GPU"));
}

/// Checks messages of a rank to itself, collectives of one rank, and calls that must be refused.
fn one_rank(mut rank: Nccl) {
    assert_eq!((rank.rank(), rank.size(), rank.memory()), (0, 1, Memory::Device));
    let stream = rank.compute().clone();
    let bytes: Vec<u8> = (0..LEN).map(|i| (i % 251) as u8).collect();
    let from = stream.clone_htod(&bytes).unwrap();
    let mut to = stream.alloc_zeros::<u8>(LEN).unwrap();
    let (from_address, to_address) = (address(&from, &stream), address_mut(&mut to, &stream));

    let tag = Tag::default();
    let program = [
        Call::Start(Start::Receive { from: 0, tag, len: LEN }),
        Call::Start(Start::Send { to: 0, tag, len: LEN }),
        Call::Wait(1),
        Call::Wait(0),
    ];
    let order = rank.agree(&program).unwrap().unwrap();
    for run in 0..3 {
        stream.memset_zeros(&mut to).unwrap();
        rank.follow(&order).unwrap();
        // SAFETY: the buffers are not accessed until the waits.
        let requests: [Request; 2] =
            unsafe { [rank.irecv(to_address, LEN, 0, tag).unwrap(), rank.isend(from_address, LEN, 0, tag).unwrap()] };
        for request in requests.into_iter().rev() {
            if run < 2 { rank.wait(request).unwrap() } else { rank.wait_on_device(request).unwrap() }
        }
        rank.settle().unwrap();
        assert!(stream.clone_dtoh(&to).unwrap() == bytes);
    }

    stream.memset_zeros(&mut to).unwrap();
    let lens = [LEN];
    let collectives = [
        Collective::AllReduce { values: from_address.cast_mut().cast(), count: LEN / 4 },
        Collective::Broadcast { bytes: from_address.cast_mut(), len: LEN, root: 0 },
        Collective::Barrier,
        Collective::AllToAllV {
            send: from_address,
            send_lens: lens.as_ptr(),
            receive: to_address,
            receive_lens: lens.as_ptr(),
        },
    ];
    for collective in collectives {
        // SAFETY: the memory of the operation is not accessed until the wait.
        let request = unsafe { rank.start(collective) }.unwrap();
        rank.wait(request).unwrap();
    }
    assert!(stream.clone_dtoh(&to).unwrap() == bytes && stream.clone_dtoh(&from).unwrap() == bytes);

    let mut part = rank.split(0, 0).unwrap();
    part.barrier().unwrap();

    // SAFETY: nothing is lent, because both starts fail.
    let (message, host) = unsafe {
        let message = rank.isend(from_address, LEN, 0, tag).unwrap_err();
        (message, rank.start(Collective::Broadcast { bytes: bytes.as_ptr().cast_mut(), len: 8, root: 0 }).unwrap_err())
    };
    assert!(message.to_string().contains("without an agreed order"), "{message}");
    assert!(matches!(host, CommunicatorError::NotOnDevice { .. }), "{host}");
    drop(part);
}

fn address(slice: &CudaSlice<u8>, stream: &Arc<CudaStream>) -> *const u8 {
    slice.device_ptr(stream).0 as *const u8
}

fn address_mut(slice: &mut CudaSlice<u8>, stream: &Arc<CudaStream>) -> *mut u8 {
    slice.device_ptr_mut(stream).0 as *mut u8
}
