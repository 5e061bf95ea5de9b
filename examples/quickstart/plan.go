package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/swactor/provisioning"
)

// printPlan says what the next pass would do.
func printPlan(out io.Writer, plan provisioning.Plan) {
	fmt.Fprintf(out, "The first pass towards generation %d, %d steps:\n", plan.ObservedGeneration, len(plan.Actions))
	for _, a := range plan.Actions {
		fmt.Fprintf(out, "%-12s %-8v %v: %s\n", printable(string(a.Node)), a.Kind, a.Rule, a.Rule.Why)
	}
	for _, f := range plan.Faults {
		fmt.Fprintf(out, "%-12s cannot go on: %s\n", printable(string(f.Node)), printable(f.Err.Error()))
	}
}

// withImage is the wish for another image in every group.
func withImage(shape provisioning.ClusterShape, image string) provisioning.ClusterShape {
	shape.Generation++
	shape.Groups = slices.Clone(shape.Groups)
	for i := range shape.Groups {
		shape.Groups[i].Shape.Image = image
	}
	return shape
}

// planUpdate brings the fleet up, so that there is something to lose, and says
// what an update would change. The update is not made.
func planUpdate(ctx context.Context, out io.Writer, s *story, next provisioning.ClusterShape) (untrue []string) {
	first := s.chapters[0]
	s.play(ctx, first)
	untrue = first.untrue
	if untrue == nil {
		plan, err := s.host.PlanUpdate(next)
		if err != nil {
			untrue = []string{err.Error()}
		} else {
			printUpdate(out, plan)
		}
	}
	s.provider.end()
	if _, err := s.host.Close(ctx); err != nil {
		untrue = append(untrue, err.Error())
	}
	return untrue
}

func printUpdate(out io.Writer, plan provisioning.UpdatePlan) {
	fmt.Fprintf(out, "\nOnce the fleet is up, an update to %s\n", printable(plan.String()))
	for _, c := range plan.Changes {
		now := "not ready"
		if c.Ready {
			now = "ready"
		}
		fmt.Fprintf(out, "%-12s %-8v %s\n", printable(string(c.Node)), c.Kind, strings.TrimSpace(now+" "+strings.Join(c.Differs, ", ")))
	}
}
