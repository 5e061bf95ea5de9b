// Package fakebackend plays the provider and the bootstrap of its machines in
// memory, for tests, examples and simulations of package provisioning.
//
// A [Backend] is an [provisioning.EffectBackend] that keys everything on the
// ExternalKey, as the contract asks of a real one. It is deterministic: its
// time moves only when a test moves it ([Backend.AdvanceTo]), it never sleeps,
// and its ids are made of the keys alone, so that the order in which
// independent calls run does not show in them.
//
// Three kinds of provider can be played, see [Class]. A script says call by
// call what goes wrong, see [Outcome]:
//
//	fake := fakebackend.New(fakebackend.Config{})
//	fake.Script("w-0", provisioning.CreateLease, fakebackend.DoneAmbiguous())
//
// makes the first create of w-0 buy a machine and lose the answer. Without a
// script every call succeeds, and a bootstrap reports its join by itself.
//
// # Ways to run it
//
// On goroutines (ExecutorConfig.Go is nil): an outcome that hangs blocks its
// goroutine until [Backend.Release] or [Backend.Close], one that is slow
// until the clock has been moved far enough.
//
// Deferred (ExecutorConfig.Go is [Work.Go]): calls wait in a [Work] until the
// test runs them, in any order. Each runs on a goroutine of its own, but only
// one at a time, and whoever starts or releases it waits until it has finished
// or blocks: everything happens in one order, the test's. [Work.Clock] runs a
// whole provisioning.Host in virtual time that way.
//
// Inline (ExecutorConfig.Go calls its argument, Config.Inline is set): nothing
// may block, and [Backend.Script] panics at an outcome that would.
//
// [Check] holds anybody's backend to the same contract.
package fakebackend
