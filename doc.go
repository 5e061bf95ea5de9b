// Package provisioning drives a declared cluster toward convergence: it rents
// machines, boots them, repairs them and gives them back.
//
// A caller declares a [ClusterShape]: groups of equal nodes, a count, an image,
// boot parameters. The library keeps comparing that wish with what it has
// observed and takes the next safe step for every node until both match. It is
// level-triggered: a pass is a function of the observed state, the wish and
// now, never of the event that caused it, so events may be lost, repeated or
// reordered, and a pass may be cut off.
//
// # Roles
//
//   - [Decide] and [DecideNode] choose the next step. They are pure: no clock,
//     no I/O, no randomness, no writes.
//   - [ClusterDriver] is the only writer of the observed state. It folds
//     observations, decides, records every operation before it submits it, and
//     says when it wants to be called again.
//   - [Executor] makes the calls to the user's [EffectBackend], at most one at
//     a time per attempt, and never the same operation twice.
//   - [Host] is the loop around both. A user may write their own.
//
// # A loop of your own
//
// Whoever drives without a Host does this:
//
//  1. Hand every observation to [ClusterDriver.Deliver], from any goroutine. The
//     executor does so with its results.
//  2. Call [ClusterDriver.DriveUntilBlocked] after deliveries, after
//     [ClusterDriver.UpdateDesired], and when [ClusterDriver.RequeueAt] has come.
//     One goroutine at a time.
//  3. Give it the present time, which may stand still or go back; no wait is
//     lengthened by that, and nothing fires early. Call
//     [ClusterDriver.TriggerIfDue] right before an update, a Pause or a Resume,
//     so that their events and the journal date them by the present time and
//     not by the last pass. Whichever goroutines that happens on, no reading of
//     the clock may overtake another.
//  4. Sleep until RequeueAt or the next delivery. A slow tick beside it is a
//     safety net, not what moves things.
//  5. On the way out, stop driving, close the executor, and look at
//     [ClusterDriver.Held]: what is listed there goes on costing money.
//
// # Identity
//
// A slot is named {group}-{index}. An attempt is one incarnation of a slot; its
// number is never used again. An operation is one dispatched effect of an
// attempt. Everything an attempt asks of a provider carries its [ExternalKey],
// so that a retry adopts what an earlier call has made.
//
// The rules of the ladder are numbered R0 to R17 (decide.go), the rules of a
// backend B1 to B11 ([EffectBackend]), the invariants of the state S1 to S8
// ([ClusterState.Check]) and the guarantees G1 to G12 (README). Code and tests
// refer to them by these names.
package provisioning
