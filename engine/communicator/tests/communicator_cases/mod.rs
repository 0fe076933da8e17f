//! The requirements on every backend, as a list of cases that all ranks of a world run.
//!
//! Each rank's values are defined by a formula. So the expected result of a collective is computed here by plain code.

use gapless_communicator::{Collective, Communicator, Direction, Request, Result, Tag};

/// A case, run by all ranks of a world of any size.
pub type Case = fn(&mut dyn Communicator) -> Result<()>;

/// All cases, by name.
pub const CASES: &[(&str, Case)] = &[
    ("ping-pong", ping_pong),
    ("crossing sends", crossing_sends),
    ("tags out of order", tags_out_of_order),
    ("one tag keeps its order", one_tag_keeps_its_order),
    ("oneself", oneself),
    ("empty messages", empty_messages),
    ("all_reduce", all_reduce),
    ("reduce_scatter", reduce_scatter),
    ("all_gather", all_gather),
    ("all_to_all_v", all_to_all_v),
    ("broadcast", broadcast),
    ("barrier", barrier),
    ("collectives and messages at once", overlap),
    ("split", split),
    ("split of a mesh", mesh),
];

/// Sizes around every boundary inside the backends: zero, one, a block, a segment, several segments.
const COUNTS: [usize; 8] = [0, 1, 7, 1024, 1025, 16_384, 16_385, 100_003];

fn tag(micro_batch: u32) -> Tag {
    Tag { direction: Direction::Forward, stage: 1, micro_batch, tensor: 0 }
}

/// Element `i` of a rank's values. Its magnitude varies so much that a sum depends on its order.
fn value(rank: usize, i: usize) -> f32 {
    let hash = (rank * 1_000_003 + i).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
    let sign = if hash & 1 == 0 { 1.0 } else { -1.0 };
    sign * (1.0 + (hash >> 8 & 0xFFFF) as f32 / 65_536.0) * 2f32.powi((hash >> 1 & 15) as i32 - 8)
}

fn values(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| value(rank, i)).collect()
}

/// Byte `i` of a message.
fn byte(from: usize, to: usize, i: usize) -> u8 {
    (from * 131 + to * 31 + i * 7 + i / 251) as u8
}

fn bytes(from: usize, to: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| byte(from, to, i)).collect()
}

/// The sum over all ranks, in the order of ranks.
fn sums(ranks: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| (1..ranks).fold(value(0, i), |sum, rank| sum + value(rank, i))).collect()
}

#[track_caller]
fn assert_bits(found: &[f32], expected: &[f32]) {
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert!(bits(found) == bits(expected), "{} elements differ in their bits", found.len());
}

/// Ranks 0 and 1 exchange messages, so do ranks 2 and 3, and so on. If the number of ranks is odd, the last does
/// nothing.
fn ping_pong(rank: &mut dyn Communicator) -> Result<()> {
    let (me, peer) = (rank.rank(), rank.rank() ^ 1);
    if peer >= rank.size() {
        return Ok(());
    }
    for (round, len) in COUNTS.into_iter().enumerate() {
        let tag = tag(round as u32);
        let mut received = vec![0; len];
        if me < peer {
            rank.send(&bytes(me, peer, len), peer, tag)?;
            rank.receive(&mut received, peer, tag)?;
        } else {
            rank.receive(&mut received, peer, tag)?;
            rank.send(&bytes(me, peer, len), peer, tag)?;
        }
        assert!(received == bytes(peer, me, len), "{len} bytes");
    }
    Ok(())
}

/// Every rank sends to every rank before any rank receives.
fn crossing_sends(rank: &mut dyn Communicator) -> Result<()> {
    for len in COUNTS {
        let (me, size) = (rank.rank(), rank.size());
        let out: Vec<Vec<u8>> = (0..size).map(|to| bytes(me, to, len)).collect();
        let mut into = vec![vec![0; len]; size];
        let mut requests = Vec::new();
        for (to, bytes) in out.iter().enumerate() {
            // SAFETY: `out` is not changed until the waits below.
            requests.push(unsafe { rank.isend(bytes.as_ptr(), len, to, tag(0)) }?);
        }
        for (from, bytes) in into.iter_mut().enumerate() {
            // SAFETY: `into` is not accessed until the waits below.
            requests.push(unsafe { rank.irecv(bytes.as_mut_ptr(), len, from, tag(0)) }?);
        }
        requests.into_iter().try_for_each(|request| rank.wait(request))?;
        for (from, received) in into.iter().enumerate() {
            assert!(*received == bytes(from, me, len), "from rank {from}");
        }
    }
    Ok(())
}

/// Sends messages to the next rank of a ring, which receives them in another order. The messages' tags differ in
/// several fields.
fn tags_out_of_order(rank: &mut dyn Communicator) -> Result<()> {
    const MESSAGES: usize = 60;
    let (me, size) = (rank.rank(), rank.size());
    let (next, before) = ((me + 1) % size, (me + size - 1) % size);
    let tag = |i: usize| Tag {
        direction: if i.is_multiple_of(2) { Direction::Forward } else { Direction::Backward },
        stage: (i / 2 % 3) as u32,
        micro_batch: (i / 6) as u32,
        tensor: 0,
    };
    let out: Vec<Vec<u8>> = (0..MESSAGES).map(|i| bytes(me, i, 10 + i)).collect();
    let mut into: Vec<Vec<u8>> = (0..MESSAGES).map(|i| vec![0; 10 + i]).collect();
    let mut requests = Vec::new();
    for (i, bytes) in out.iter().enumerate() {
        // SAFETY: `out` is not changed until the waits below.
        requests.push(unsafe { rank.isend(bytes.as_ptr(), bytes.len(), next, tag(i)) }?);
    }
    for i in (0..MESSAGES).map(|i| i * 37 % MESSAGES) {
        // SAFETY: `into` is not accessed until the waits below.
        requests.push(unsafe { rank.irecv(into[i].as_mut_ptr(), into[i].len(), before, tag(i)) }?);
    }
    while !requests.is_empty() {
        rank.wait(requests.swap_remove(requests.len() / 3))?;
    }
    for (i, received) in into.iter().enumerate() {
        assert!(*received == bytes(before, i, 10 + i), "message {i}");
    }
    Ok(())
}

fn one_tag_keeps_its_order(rank: &mut dyn Communicator) -> Result<()> {
    let (me, size) = (rank.rank(), rank.size());
    let (next, before) = ((me + 1) % size, (me + size - 1) % size);
    let out: Vec<Vec<u8>> = (0..20).map(|i| bytes(me, i, 100)).collect();
    let mut requests = Vec::new();
    for bytes in &out {
        // SAFETY: `out` is not changed until the waits below.
        requests.push(unsafe { rank.isend(bytes.as_ptr(), bytes.len(), next, tag(0)) }?);
    }
    for i in 0..20 {
        let mut received = vec![0; 100];
        rank.receive(&mut received, before, tag(0))?;
        assert!(received == bytes(before, i, 100), "message {i}");
    }
    requests.into_iter().try_for_each(|request| rank.wait(request))
}

fn oneself(rank: &mut dyn Communicator) -> Result<()> {
    let me = rank.rank();
    let out = bytes(me, me, 5000);
    let mut into = vec![0; 5000];
    // SAFETY: the buffers are not accessed until the waits below.
    let requests =
        unsafe { [rank.irecv(into.as_mut_ptr(), 5000, me, tag(3))?, rank.isend(out.as_ptr(), 5000, me, tag(3))?] };
    requests.into_iter().try_for_each(|request| rank.wait(request))?;
    assert!(into == out);
    Ok(())
}

fn empty_messages(rank: &mut dyn Communicator) -> Result<()> {
    let (me, size) = (rank.rank(), rank.size());
    // SAFETY: nothing is lent.
    let request = unsafe { rank.isend(std::ptr::dangling(), 0, (me + 1) % size, tag(9)) }?;
    rank.receive(&mut [], (me + size - 1) % size, tag(9))?;
    rank.wait(request)?;
    rank.all_reduce(&mut [])?;
    rank.reduce_scatter(&[], &mut [])?;
    rank.all_gather(&[], &mut [])?;
    rank.all_to_all_v(&[], &vec![0; size], &mut [], &vec![0; size])?;
    rank.broadcast(&mut [], size - 1)
}

fn all_reduce(rank: &mut dyn Communicator) -> Result<()> {
    for count in COUNTS {
        let expected = sums(rank.size(), count);
        for _repeat in 0..3 {
            let mut found = values(rank.rank(), count);
            rank.all_reduce(&mut found)?;
            assert_bits(&found, &expected);
        }
    }
    Ok(())
}

fn reduce_scatter(rank: &mut dyn Communicator) -> Result<()> {
    let (me, size) = (rank.rank(), rank.size());
    for count in COUNTS {
        let mut send = values(me, count * size);
        let expected = &sums(size, count * size)[me * count..][..count];
        let mut found = vec![0.0; count];
        rank.reduce_scatter(&send, &mut found)?;
        assert_bits(&found, expected);

        // The result is written in place, into the rank's own part.
        let base = send.as_mut_ptr();
        // SAFETY: `send` is not accessed until the wait, and the operands only overlap as `Collective` allows.
        let request =
            unsafe { rank.start(Collective::ReduceScatter { send: base, receive: base.add(me * count), count }) }?;
        rank.wait(request)?;
        assert_bits(&send[me * count..][..count], expected);
    }
    Ok(())
}

fn all_gather(rank: &mut dyn Communicator) -> Result<()> {
    let (me, size) = (rank.rank(), rank.size());
    for len in COUNTS {
        let expected: Vec<u8> = (0..size).flat_map(|from| bytes(from, 0, len)).collect();
        let mut found = vec![0; len * size];
        rank.all_gather(&bytes(me, 0, len), &mut found)?;
        assert!(found == expected);

        // The rank's part is read in place, from its own part of the result.
        let mut found = vec![0; len * size];
        found[me * len..][..len].copy_from_slice(&bytes(me, 0, len));
        let receive = found.as_mut_ptr();
        // SAFETY: `found` is not accessed until the wait, and the operands only overlap as `Collective` allows.
        let request = unsafe { rank.start(Collective::AllGather { send: receive.add(me * len), receive, len }) }?;
        rank.wait(request)?;
        assert!(found == expected);
    }
    Ok(())
}

fn all_to_all_v(rank: &mut dyn Communicator) -> Result<()> {
    let (me, size) = (rank.rank(), rank.size());
    let lens: [fn(usize, usize) -> usize; 4] = [
        |from, to| from * 1000 + to * 10,
        |from, to| if from == to { 0 } else { 5000 },
        |from, _| if from == 0 { 40_000 } else { 0 },
        |_, to| if to == 0 { 40_000 } else { 0 },
    ];
    for len in lens {
        let send: Vec<u8> = (0..size).flat_map(|to| bytes(me, to, len(me, to))).collect();
        let expected: Vec<u8> = (0..size).flat_map(|from| bytes(from, me, len(from, me))).collect();
        let send_lens: Vec<usize> = (0..size).map(|to| len(me, to)).collect();
        let receive_lens: Vec<usize> = (0..size).map(|from| len(from, me)).collect();
        let mut found = vec![0; expected.len()];
        rank.all_to_all_v(&send, &send_lens, &mut found, &receive_lens)?;
        assert!(found == expected);
    }
    Ok(())
}

fn broadcast(rank: &mut dyn Communicator) -> Result<()> {
    for root in 0..rank.size() {
        for len in COUNTS {
            let mut found = if rank.rank() == root { bytes(root, 0, len) } else { vec![0; len] };
            rank.broadcast(&mut found, root)?;
            assert!(found == bytes(root, 0, len));
        }
    }
    Ok(())
}

/// Checks that many barriers in a row end.
fn barrier(rank: &mut dyn Communicator) -> Result<()> {
    for _ in 0..50 {
        rank.barrier()?;
    }
    Ok(())
}

/// Two collectives and a ring of messages are in progress at once. The order of waits differs from rank to rank.
fn overlap(rank: &mut dyn Communicator) -> Result<()> {
    let (me, size) = (rank.rank(), rank.size());
    let (next, before) = ((me + 1) % size, (me + size - 1) % size);
    let (count, len) = (50_000, 70_000);
    let gradients = values(me, count * size);
    let mut shard = vec![0.0; count];
    let (out, mut into) = (bytes(me, next, len), vec![0; len]);
    let mut reduced = values(me, count);
    // SAFETY: none of these buffers is accessed until the waits below.
    let mut requests: Vec<Request> = unsafe {
        vec![
            rank.start(Collective::ReduceScatter { send: gradients.as_ptr(), receive: shard.as_mut_ptr(), count })?,
            rank.irecv(into.as_mut_ptr(), len, before, tag(1))?,
            rank.start(Collective::AllReduce { values: reduced.as_mut_ptr(), count })?,
            rank.isend(out.as_ptr(), len, next, tag(1))?,
        ]
    };
    requests.rotate_left(me % 4);
    requests.into_iter().try_for_each(|request| rank.wait(request))?;
    assert_bits(&shard, &sums(size, count * size)[me * count..][..count]);
    assert_bits(&reduced, &sums(size, count));
    assert!(into == bytes(before, me, len));
    Ok(())
}

/// Splits the world into groups of odd and of even ranks, numbered in reverse. Messages within a group and within the
/// world are separate.
fn split(rank: &mut dyn Communicator) -> Result<()> {
    let (me, size) = (rank.rank(), rank.size());
    let mut part = rank.split(me % 2, size - me)?;
    let members: Vec<usize> = (0..size).rev().filter(|other| other % 2 == me % 2).collect();
    assert_eq!(part.size(), members.len());
    assert_eq!(members[part.rank()], me);

    let mut all = vec![0; part.size()];
    part.all_gather(&[me as u8], &mut all)?;
    assert_eq!(all, members.iter().map(|rank| *rank as u8).collect::<Vec<_>>());

    let mut sum = [me as f32];
    part.all_reduce(&mut sum)?;
    rank.all_reduce(&mut sum)?;
    let of_part = |rank: usize| (0..size).filter(|other| other % 2 == rank % 2).sum::<usize>();
    assert_eq!(sum[0], (0..size).map(of_part).sum::<usize>() as f32);

    // The same peer and tag are used in both communicators. Each message must arrive in the communicator in which it
    // was sent.
    let next = (part.rank() + 1) % part.size();
    let before = members[(part.rank() + part.size() - 1) % part.size()];
    let (in_part, in_whole, mut received) = ([1, me as u8], [2, me as u8], [[0; 2]; 2]);
    // SAFETY: the arrays are not accessed until the waits below.
    unsafe {
        let whole = rank.isend(in_whole.as_ptr(), 2, members[next], tag(0))?;
        let within = part.isend(in_part.as_ptr(), 2, next, tag(0))?;
        let from = (part.rank() + part.size() - 1) % part.size();
        part.receive(&mut received[0], from, tag(0))?;
        rank.receive(&mut received[1], before, tag(0))?;
        part.wait(within)?;
        rank.wait(whole)?;
    }
    assert_eq!(received, [[1, before as u8], [2, before as u8]]);
    Ok(())
}

/// Splits the world into a mesh of two columns, with a communicator along each axis, and splits a communicator of size
/// 1 from a row.
fn mesh(rank: &mut dyn Communicator) -> Result<()> {
    let (row, column) = (rank.rank() / 2, rank.rank() % 2);
    let mut along_row = rank.split(row, column)?;
    let mut along_column = rank.split(column, row)?;
    assert_eq!((along_row.rank(), along_column.rank()), (column, row));
    let mut sum = [1.0];
    along_row.all_reduce(&mut sum)?;
    assert_eq!(sum[0] as usize, along_row.size());
    along_column.all_reduce(&mut sum)?;
    let mut alone = along_row.split(along_row.rank(), 0)?;
    assert_eq!((alone.rank(), alone.size()), (0, 1));
    let before = sum;
    alone.all_reduce(&mut sum)?;
    assert_eq!(sum, before);
    rank.barrier()
}
